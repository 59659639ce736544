"""Beyond the context: the same as reading the newest half from scratch, in every way that there is
to decode."""

import pytest
import torch
from conftest import random_model
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
from thinker.generation.sampler import distribution, sample_from_probs
from thinker.generation.sequence import Completion, Sequence
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
NO_END = {TOKENIZER.bos_id: float("-inf")}
CONTEXT = 12


@pytest.fixture(scope="module", params=["rope", "learned"])
def model(request):
    return random_model(vocab_size=264, max_seq_len=CONTEXT, norm_mean=0.3, positions=request.param)


@torch.no_grad()
def from_scratch(model, tokens, view, params):
    """Every step reads what is in view, without a cache; returns the tokens and how often the view
    slid."""
    view, n_slides = list(view), 0
    sequence = Sequence(0, Completion(""), params, list(tokens), 1 << 30, TOKENIZER)
    for _ in range(params.max_new_tokens):
        if len(view) > CONTEXT:
            view, n_slides = view[-(CONTEXT // 2) :], n_slides + 1
        logits = model(torch.tensor([view]))[:, -1, : TOKENIZER.vocab_size]
        inputs = [x[None] for x in sequence.penalty_inputs([], TOKENIZER.vocab_size)]
        probs = distribution(logits, params, *inputs)
        token = sample_from_probs(probs, torch.tensor([sequence.uniform(0)])).item()
        sequence.extend([(token, 0.0, {})])
        view.append(token)
    return sequence.completion.token_ids, n_slides


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, *if_installed("speculation", {"speculate": 3})]
)
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 1},
    ],
)
def test_it_equals_reading_the_newest_half_from_scratch(model, options, more):
    generator = Generator(model, TOKENIZER, slide=True, **options)
    prompts = ["", "hello", "x" * (CONTEXT - 1), "hello"]
    params = [SamplingParams(max_new_tokens=n, logit_bias=NO_END, **more) for n in (30, 7, 25, 8)]
    for completion, own in zip(generator.generate(prompts, params), params):
        tokens = generator.encode(completion.prompt)
        assert (completion.token_ids, completion.n_slides) == from_scratch(
            model, tokens, tokens, own
        )
        assert completion.finish_reason == "length"


def test_without_it_a_text_ends_with_the_context(model):
    (stopped,) = Generator(model, TOKENIZER).generate(
        "hello", SamplingParams(40, logit_bias=NO_END, seed=1)
    )
    (slid,) = Generator(model, TOKENIZER, slide=True).generate(
        "hello", SamplingParams(40, logit_bias=NO_END, seed=1)
    )
    assert (len(stopped.token_ids), stopped.n_slides) == (CONTEXT + 1 - 6, 0)
    assert (len(slid.token_ids), slid.n_slides) == (40, 5)
    assert slid.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_stop_strings_and_the_end_of_a_text_are_found_beyond_the_context(model):
    generator = Generator(model, TOKENIZER, slide=True)
    params = SamplingParams(40, logit_bias=NO_END, seed=1)
    (free,) = generator.generate("hello", params)
    stop = free.text[20:23]
    (stopped,) = generator.generate(
        "hello", SamplingParams(40, logit_bias=NO_END, seed=1, stop=[stop])
    )
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert "".join(generator.stream("hello", params)) == free.text
    likely_end = SamplingParams(400, logit_bias={TOKENIZER.bos_id: 3.0}, seed=1)
    (ended,) = generator.generate("hello", likely_end)
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == TOKENIZER.bos_id


def test_what_does_not_slide(model):
    generator = Generator(model, TOKENIZER, slide=True)
    with pytest.raises(UserError, match="context is 12"):
        generator.generate("x" * CONTEXT, SamplingParams(5))
    if model.config.positions == "rope":
        (windowed,) = Generator(model, TOKENIZER, slide=True, window=6).generate(
            "hello", SamplingParams(40)
        )
        assert windowed.n_slides == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        *if_installed("speculation", {"speculate": 3}),
        {"bits": 8},
        *if_installed("speculation", {"bits": 4, "speculate": 4}),
    ],
)
def test_turns_slide_as_a_text_in_one_go(model, options):
    """Greedily, turns in which the user adds nothing are one long text, wherever they end."""
    generator = Generator(model, TOKENIZER, slide=True, **options)
    conversation = Conversation(generator)
    for text, n_new in [
        ("hello", 3),
        ("", 4),
        ("", 1),
        ("", 1),
        ("", 9),
        ("", 30),
    ]:  # the second ends at the border
        list(conversation.reply(text, SamplingParams(n_new, 0, logit_bias=NO_END)))
    (completion,) = generator.generate("hello", SamplingParams(48, 0, logit_bias=NO_END))
    assert conversation.tokens == [*generator.encode("hello"), *completion.token_ids]
    assert completion.n_slides == 6


def view(n_tokens):
    """How many of a text's newest tokens the model reads."""
    n_read = 0
    for _ in range(n_tokens):
        n_read = CONTEXT // 2 if n_read == CONTEXT + 1 else n_read
        n_read += 1
    return n_read if n_read <= CONTEXT else CONTEXT // 2


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("options", [{}, *if_installed("speculation", {"speculate": 3})])
def test_every_turn_beyond_the_context_is_a_fresh_reading_of_what_is_in_view(model, more, options):
    """Also after /undo, and after a turn that was interrupted at any token around the border."""
    conversation = Conversation(Generator(model, TOKENIZER, slide=True, **options))
    params = SamplingParams(7, seed=3, logit_bias=NO_END, **more)

    def check(text):
        tokens = conversation.tokens + TOKENIZER.encode(text)
        seen = tokens[-view(len(tokens)) :]
        list(conversation.reply(text, params))
        assert conversation.tokens == tokens + from_scratch(model, tokens, seen, params)[0]

    for text in ("he", "llo", "", "four", "", "x"):
        check(text)
    for n_pieces in range(1, 7):
        before = list(conversation.tokens)
        pieces = conversation.reply("y", params)
        for _ in range(n_pieces):
            next(pieces, None)
        pieces.close()
        check("")
        assert [conversation.undo(), conversation.undo()] == [True, True]
        assert conversation.tokens == before
        assert conversation.undo()
        check("abc" if n_pieces < 4 else "d")
    while conversation.undo():
        pass
    check("he")


def test_a_new_text_is_read_whole_or_refused(model):
    conversation = Conversation(Generator(model, TOKENIZER, compile=False, slide=True))
    passes = []
    hook = conversation.generator.model.register_forward_pre_hook(
        lambda _, args: passes.append(args[0].tolist()[0])
    )
    list(conversation.reply("hello", SamplingParams(7, logit_bias=NO_END)))
    before, text = list(conversation.tokens), "x" * CONTEXT
    with pytest.raises(UserError, match="the prompt has 13 tokens, but the model's context is 12"):
        list(conversation.reply(text + "x", SamplingParams(7)))
    assert conversation.tokens == before
    del passes[:]
    next(conversation.reply(text, SamplingParams(7, logit_bias=NO_END)))
    assert passes[0] == TOKENIZER.encode(text)
    hook.remove()


def test_what_happens_at_the_end_of_the_context_is_said_once(model):
    slides, ends = (
        Conversation(Generator(model, TOKENIZER, slide=slide)) for slide in (True, False)
    )
    params = SamplingParams(5, logit_bias=NO_END)
    said = {}
    for conversation in (slides, ends):
        for text in ("hello", "", ""):
            try:
                list(conversation.reply(text, params))
                said.setdefault(conversation, []).append(list(conversation.news()))
            except UserError as error:
                said[conversation].append(str(error))
    line = "the context of 12 tokens is full: the text continues from its newest 6 (see --no-slide)"
    assert said[slides] == [[], [line], []]
    assert said[ends][0] == []
    assert said[ends][1][0].startswith("stopped at the end of the context (12 tokens)")
    assert said[ends][2].startswith("the prompt has 13 tokens, but the model's context is 12")
    slides.reset()
    for text, lines in [
        ("hello", []),
        ("world", [line]),
    ]:  # the new text alone goes beyond the context
        list(slides.reply(text, SamplingParams(2, logit_bias=NO_END)))
        assert list(slides.news()) == lines
