"""Several steps between two reads of the device sample the same texts as one."""

import dataclasses
import functools

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    EOS,
    PARAMS,
    PROMPTS,
    SAME_EXAMPLES,
    SHAPES,
    TOKENIZER,
    assert_same,
    small_model,
)

from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
from thinker.generation.prompt_scores import PromptScores
from thinker.generation.ranking import rank
from thinker.model import Thinker, ThinkerConfig

ALL_SHAPES = [*SHAPES, {"attention": "window(6)"}, {"attention": "linear(8)"}]


@functools.cache
def make_generator(shape, steps_per_read):
    generator = Generator(small_model(shape, **ALL_SHAPES[shape]), TOKENIZER)
    generator.decoder.steps_per_read = steps_per_read
    return generator


@settings(max_examples=examples(100), **SAME_EXAMPLES)
@given(st.data())
def test_steps_per_read_do_not_change_the_texts(data):
    shape, prompts = data.draw(st.integers(0, len(ALL_SHAPES) - 1)), data.draw(PROMPTS)
    n_steps = data.draw(st.sampled_from([2, 3, 16]))
    params = [
        dataclasses.replace(data.draw(PARAMS), logprobs=data.draw(st.integers(0, 3)))
        for _ in prompts
    ]
    one, several = (make_generator(shape, n).generate(prompts, params) for n in (1, n_steps))
    assert_same(one, several)
    for a, b, each in zip(one, several, params, strict=True):
        assert [list(top) for top in a.top_logprobs] == [list(top) for top in b.top_logprobs]
        assert {len(top) for top in b.top_logprobs} == ({each.logprobs} if each.logprobs else set())


@pytest.mark.parametrize("attention", ["full", "window(6)", "linear(8)"])
def test_a_conversation_goes_on_after_a_text_that_ended_between_reads(attention):
    """The cache then holds tokens that are not in the text; it is truncated, or made anew."""
    texts = []
    for steps_per_read in (1, 16):
        generator = Generator(small_model(3, attention=attention), TOKENIZER)
        generator.decoder.steps_per_read = steps_per_read
        talk, params = (
            Conversation(generator),
            SamplingParams(12, temperature=0.5, logit_bias={97: 60.0, EOS: 59.5}),
        )
        for turn, text in enumerate(["ab", "c", "ba"]):
            "".join(talk.reply(text, dataclasses.replace(params, seed=turn)))
        texts.append(talk.tokens)
    assert texts[0] == texts[1]
    assert texts[0].count(EOS) < 3 < len(texts[0]) < 30  # some turn ended by itself


def test_the_likeliest_tokens_of_rows_with_ties():
    scores = torch.randint(-3, 4, (6, 64), generator=torch.Generator().manual_seed(0)).double()
    scores[1], scores[2, 5:] = 0, -torch.inf
    scores[3] = torch.arange(64)
    for count in (1, 2, 7, 15, 16, 40, 64):
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(rank(scores, count), expected)


@pytest.mark.parametrize("n_top", [1, 5, 20])
def test_equally_likely_tokens_are_reported_by_id_in_any_batch(n_top):
    """A model that has not been trained finds all tokens equally likely."""
    shape = {"d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "max_seq_len": 64}
    generator = Generator(Thinker(ThinkerConfig(vocab_size=257, **shape)), TOKENIZER)
    first_ids = list(range(n_top))
    own = SamplingParams(2, logprobs=n_top)
    for n_top_of_other in (0, 3, 20):
        other = SamplingParams(2, logprobs=n_top_of_other)
        completion, _ = generator.generate(["ab", "cd"], [own, other])
        assert [list(top) for top in completion.top_logprobs] == [first_ids, first_ids]
    assert [list(top) for top in generator.score("ab", n_top).top_logprobs] == [first_ids] * 2
    scores = PromptScores([5, 6, 7], n_top, TOKENIZER.vocab_size, 0)
    scores.add(torch.zeros(2, 257))
    assert [list(top) for top in scores.top_logprobs[1:]] == [first_ids] * 2
