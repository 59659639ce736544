"""A text in turns: the cache is kept, and what comes is what a fresh start would give."""

from types import SimpleNamespace

import pytest
import torch
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.chat import interactive
from thinker.generation.chat.conversation import Conversation
from thinker.runtime.errors import UserError

TOKENIZER = make_tokenizer("byte", [])
PARAMS = SamplingParams(max_new_tokens=6, seed=3, logit_bias={TOKENIZER.eos_id: float("-inf")})


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(vocab_size=264, max_seq_len=96)


def fresh(generator, tokens, params):
    """The tokens and the model's continuation of them, without an earlier cache."""
    completion = Completion("")
    for _ in generator.stream_batch([completion], params, [tokens]):
        pass
    return tokens + completion.token_ids


def counted(generator):
    """A list that grows by the number of positions of every pass."""
    passes = []
    generator.model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    return passes


@pytest.mark.parametrize(
    "how",
    [
        {},
        *if_installed("speculation", {"speculate": 3}),
        {"window": 12, "sinks": 2},
        {"window": 90},
    ],
)
def test_every_turn_equals_a_fresh_prefill_and_reads_only_new_tokens(model, how):
    generator = Generator(model, TOKENIZER, compile=False, **how)
    conversation, passes = Conversation(generator), counted(generator)
    for text in ("Once upon", " a time", "", ", there was a fox"):
        expected = fresh(
            Generator(model, TOKENIZER, **how), conversation.tokens + TOKENIZER.encode(text), PARAMS
        )
        del passes[:]
        pieces = list(conversation.reply(text, PARAMS))
        assert conversation.tokens == expected
        assert passes[0] <= len(TOKENIZER.encode(text)) + 2
        assert "".join(pieces) == TOKENIZER.decode(expected[-6:])


@pytest.mark.parametrize("how", [{}, {"window": 12, "sinks": 2}])
def test_text_continues_correctly_after_undo_and_interruption(model, how):
    generator = Generator(model, TOKENIZER, **how)
    conversation = Conversation(generator)
    list(conversation.reply("The first turn is long enough to roll.", PARAMS))
    before = list(conversation.tokens)
    pieces = conversation.reply(" A turn that is not heard to its end", PARAMS)
    next(pieces)
    pieces.close()
    assert len(before) < len(conversation.tokens) < len(before) + 36 + 6
    interrupted = list(conversation.tokens)
    expected = fresh(generator, [*interrupted, *TOKENIZER.encode("x")], PARAMS)
    list(conversation.reply("x", PARAMS))
    assert conversation.tokens == expected
    assert conversation.undo()
    assert conversation.tokens == interrupted
    assert conversation.undo()
    assert conversation.tokens == before
    expected = fresh(generator, [*before, *TOKENIZER.encode(" y")], PARAMS)
    list(conversation.reply(" y", PARAMS))
    assert conversation.tokens == expected
    conversation.reset()
    assert (conversation.text, conversation.undo()) == ("", False)


def test_recovers_from_a_failed_forward_pass(model, monkeypatch):
    """As when Ctrl-C comes while a layer is being computed: the cache says more than it holds."""
    generator = Generator(model, TOKENIZER, compile=False)
    conversation = Conversation(generator)
    list(conversation.reply("Some text", PARAMS))
    head = generator.model.lm_head.forward
    calls = []

    def interrupted(x):
        calls.append(x)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return head(x)

    monkeypatch.setattr(generator.model.lm_head, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.reply(" more", PARAMS))
    monkeypatch.setattr(generator.model.lm_head, "forward", head)
    expected = fresh(generator, [*conversation.tokens, *TOKENIZER.encode(".")], PARAMS)
    list(conversation.reply(".", PARAMS))
    assert conversation.tokens == expected


@pytest.mark.parametrize("native", [True, False])
def test_recovers_from_an_interrupted_step(model, monkeypatch, native):
    """The kernels may have read tokens that were never returned."""
    generator = Generator(model, TOKENIZER, compile=None if native else False)
    conversation = Conversation(generator)
    list(conversation.reply("Some text", PARAMS))
    decoder = type(generator.decoder)
    step, calls = decoder.sample, []

    def interrupted(self, *arguments):
        sampled = step(self, *arguments)
        calls.append(len(sampled[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sampled

    monkeypatch.setattr(decoder, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.reply(" more", PARAMS))
    monkeypatch.setattr(decoder, "sample", step)
    expected = fresh(generator, [*conversation.tokens, *TOKENIZER.encode(".")], PARAMS)
    list(conversation.reply(".", PARAMS))
    assert conversation.tokens == expected


def test_a_failed_reading_of_another_text_leaves_no_trace(model):
    conversation = Conversation(Generator(model, TOKENIZER, compile=False))
    list(conversation.reply("Some text", PARAMS))
    before = list(conversation.tokens)
    conversation.undo()
    hook = conversation.generator.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(conversation.reply("Other text", PARAMS))
    hook.remove()
    conversation.undo()
    list(conversation.reply("Some text", PARAMS))
    assert conversation.tokens == before


def test_an_end_of_text_token_does_not_end_the_conversation(model):
    with torch.no_grad():
        conversation = Conversation(Generator(model, TOKENIZER))
    only_eos = SamplingParams(max_new_tokens=5, logit_bias={TOKENIZER.eos_id: 1e9})
    assert list(conversation.reply("ab", only_eos)) == []
    assert conversation.text == "ab"
    assert conversation.tokens == [TOKENIZER.bos_id, *TOKENIZER.encode("ab")]


def test_a_text_that_does_not_fit_raises_and_changes_nothing(model):
    conversation = Conversation(Generator(model, TOKENIZER))
    list(conversation.reply("a" * 60, PARAMS))
    before = list(conversation.tokens)
    with pytest.raises(UserError, match="the model's context is 96"):
        list(conversation.reply("b" * 60, PARAMS))
    assert conversation.tokens == before
    list(conversation.reply("c", PARAMS))


@pytest.mark.parametrize("attention", ["window(10) | global(2)", "linear(8)", "strided(4)"])
def test_turns_and_undo_with_attention_variants(random_model, attention):
    model = random_model(vocab_size=264, max_seq_len=96, attention=attention)
    test_every_turn_equals_a_fresh_prefill_and_reads_only_new_tokens(model, {})
    test_text_continues_correctly_after_undo_and_interruption(model, {})


def test_a_reply_without_text_says_that_the_text_has_ended(model, capsys):
    """Otherwise Enter prints empty lines, and nobody knows why."""
    conversation = Conversation(Generator(model, TOKENIZER))
    interrupt = SimpleNamespace(pressed=False)
    for bias, is_told in ((1e9, True), (float("-inf"), False)):
        params = SamplingParams(3, logit_bias={TOKENIZER.eos_id: bias})
        interactive._print_reply(conversation, "", params, interrupt)
        assert ("the text has ended" in capsys.readouterr().err) == is_told
