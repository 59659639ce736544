"""Beyond the context: the same as reading the newest half from scratch, in every way that there is to decode."""

import pytest
import torch
from conftest import random_model

from thinker.data.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.conversation import Conversation
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
def from_scratch(model, prompt, params):
    """Every step reads what is in view, without a cache; returns the tokens and how often the view slid."""
    tokens, n_slides = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)], 0
    view, sequence = list(tokens), Sequence(0, Completion(prompt), params, tokens, 1 << 30, TOKENIZER)
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


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"speculate": 3}])
@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"seed": 3}, {"seed": 5, "repetition_penalty": 1.3, "presence_penalty": 1}]
)
def test_it_equals_reading_the_newest_half_from_scratch(model, options, more):
    generator = Generator(model, TOKENIZER, slide=True, **options)
    prompts = ["", "hello", "x" * (CONTEXT - 1), "hello"]
    params = [SamplingParams(max_new_tokens=n, logit_bias=NO_END, **more) for n in (30, 7, 25, 8)]
    for completion, own in zip(generator.generate(prompts, params), params):
        assert (completion.token_ids, completion.n_slides) == from_scratch(model, completion.prompt, own)
        assert completion.finish_reason == "length"


def test_without_it_a_text_ends_with_the_context(model):
    (stopped,) = Generator(model, TOKENIZER).generate("hello", SamplingParams(40, logit_bias=NO_END, seed=1))
    (slid,) = Generator(model, TOKENIZER, slide=True).generate("hello", SamplingParams(40, logit_bias=NO_END, seed=1))
    assert (len(stopped.token_ids), stopped.n_slides) == (CONTEXT + 1 - 6, 0)
    assert (len(slid.token_ids), slid.n_slides) == (40, 5)
    assert slid.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_stop_strings_and_the_end_of_a_text_are_found_beyond_the_context(model):
    generator = Generator(model, TOKENIZER, slide=True)
    params = SamplingParams(40, logit_bias=NO_END, seed=1)
    (free,) = generator.generate("hello", params)
    stop = free.text[20:23]
    (stopped,) = generator.generate("hello", SamplingParams(40, logit_bias=NO_END, seed=1, stop=[stop]))
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
    reply = list(Conversation(generator).reply("hello", SamplingParams(40, logit_bias=NO_END)))
    assert 0 < len("".join(reply)) <= CONTEXT + 1 - 6
    if model.config.positions == "rope":
        (windowed,) = Generator(model, TOKENIZER, slide=True, window=6).generate("hello", SamplingParams(40))
        assert windowed.n_slides == 0
