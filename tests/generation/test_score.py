"""Scoring: every token counted once, and with the same numbers that generation has."""

import copy
import functools
import math
from itertools import pairwise

import pytest
import torch
from conftest import examples, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams, Score
from thinker.generation.caches.sink_cache import SinkCache

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
TEXT = (
    "The wheel turns; é漢, and the wheel turns again, more slowly than it did before: so it seems. "
)


@functools.cache
def small_model(max_seq_len=48):
    """Random weights, every one of which matters, the same for every context."""
    return random_model(1, 0.3, 0.4, vocab_size=264, max_seq_len=max_seq_len)


generator_of = functools.cache(lambda model: Generator(model, TOKENIZER))


def teacher_forced(model, tokens):
    """The log-probabilities (T, V) after each of the tokens, by one full pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0, :, : TOKENIZER.vocab_size].log_softmax(-1)


@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(
    text=st.text("ab é漢\n", max_size=16) | st.text(max_size=12)
)  # at most 48 bytes: what the context predicts
def test_a_text_within_the_context_equals_one_forward_pass(text):
    model = small_model()
    score = generator_of(model).score(text)
    ids = TOKENIZER.encode(text)
    known = teacher_forced(model, [TOKENIZER.bos_id, *ids])
    assert score.token_ids == ids
    assert score.logprobs == pytest.approx(
        [known[i, token].item() for i, token in enumerate(ids)], abs=1e-4
    )
    assert score.n_bytes == len(text.encode())


@pytest.mark.parametrize("size", [1, 2, 7, 16, 48])
def test_a_longer_text_is_scored_in_overlapping_windows(size):
    model = small_model(size)
    generator, step = Generator(model, TOKENIZER), size - size // 2
    for length in {1, size - 1, size, size + 1, size + step, size + step + 1, 3 * size + 2, 90} - {
        0
    }:
        text = TEXT.encode()[:length].decode(errors="ignore")
        ids = TOKENIZER.encode(text)
        tokens = [TOKENIZER.bos_id, *ids]
        known, expected = {}, []
        for place, target in enumerate(ids):
            # PackedDataset begin `step` apart, and the first that reaches a place counts it.
            begin = max(0, math.ceil((place + 1 - size) / step)) * step
            n_seen = place + 1 - begin
            assert begin == 0 or n_seen >= size / 2
            assert n_seen <= size
            if begin not in known:
                known[begin] = teacher_forced(model, tokens[begin : begin + size])
            expected.append(known[begin][n_seen - 1, target].item())
        score = generator.score(text)
        assert score.token_ids == ids
        assert score.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (9, 0), (6, 3)])
def test_with_a_sink_cache_a_text_is_read_in_one_pass(window, sinks):
    model = small_model(12)
    tokens = [TOKENIZER.bos_id, *TOKENIZER.encode(TEXT)]
    cache, expected = SinkCache(model, 1, window, sinks), []
    for token, target in pairwise(tokens):
        logits = model(torch.tensor([[token]]), cache=cache)[0, 0, : TOKENIZER.vocab_size]
        expected.append(logits.log_softmax(-1)[target].item())
    score = Generator(model, TOKENIZER, window=window, sinks=sinks).score(TEXT)
    assert score.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"window": 9, "sinks": 2}])
def test_prefill_chunk_size_does_not_change_the_score(monkeypatch, options):
    generator = Generator(small_model(24), TOKENIZER, **options)
    whole = generator.score(TEXT, n_top=3)
    for size in (1, 2, 5, 23, 24, 25):
        monkeypatch.setattr("thinker.generation.decoders.decoder.PREFILL_CHUNK", size)
        pieces = generator.score(TEXT, n_top=3)
        assert pieces.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert [list(top) for top in pieces.top_logprobs] == [
            list(top) for top in whole.top_logprobs
        ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        *if_installed("speculation", {"speculate": 3}),
        {"window": 20, "sinks": 2},
        {"use_cache": False},
    ],
)
def test_scores_equal_the_logprobs_of_generation(options):
    generator = Generator(small_model(), TOKENIZER, **options)
    letters = dict.fromkeys(
        b"abcdefgh ", 30.0
    )  # bytes that are characters, so that the text has these tokens again
    prompts = ["", "Hello, é", "ab" * 10]
    params = SamplingParams(
        max_new_tokens=25, logit_bias=letters, presence_penalty=0.5, seed=7, logprobs=2
    )
    for completion in generator.generate(prompts, params):
        score = generator.score(completion.prompt + completion.text, n_top=2)
        drawn = len(completion.token_ids)
        assert score.token_ids[-drawn:] == completion.token_ids
        assert score.logprobs[-drawn:] == pytest.approx(completion.logprobs, abs=1e-4)
        assert [list(top) for top in score.top_logprobs[-drawn:]] == [
            list(top) for top in completion.top_logprobs
        ]


def test_top_logprobs_at_every_position():
    model = small_model(16)
    generator = Generator(model, TOKENIZER)
    score = generator.score(TEXT, n_top=4)  # over several windows
    assert len(score.top_logprobs) == len(score.logprobs) == len(TEXT.encode())
    for token, logprob, top in zip(score.token_ids, score.logprobs, score.top_logprobs):
        assert len(top) == 4
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top.get(token, logprob) == logprob <= max(top.values())
    known = teacher_forced(model, [TOKENIZER.bos_id, *score.token_ids[:15]])
    for place, top in enumerate(score.top_logprobs[:16]):
        values, tokens = known[place].topk(4)
        assert list(top) == tokens.tolist()
        assert list(top.values()) == pytest.approx(values.tolist(), abs=1e-4)
    assert generator.score(TEXT).top_logprobs == []
    everything = generator.score("a", n_top=1000).top_logprobs[0]
    assert sorted(everything) == list(range(TOKENIZER.vocab_size))  # the model's own ids end at 263


def test_nats_and_bits_per_byte():
    score = Score([1, 2, 3], [-1.0, -2.5, -0.5], [], 8)
    assert score.nats == 4.0
    assert score.bits_per_byte == pytest.approx(4.0 / math.log(2) / 8)
    one = Generator(small_model(), TOKENIZER).score("é漢")
    assert one.n_bytes == 5
    assert one.bits_per_byte == pytest.approx(-sum(one.logprobs) / math.log(2) / 5)


def test_bits_per_byte_of_certain_and_uniform_predictions():
    model = copy.deepcopy(small_model())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    uniform = Generator(model, TOKENIZER).score(TEXT)
    assert uniform.bits_per_byte == pytest.approx(
        math.log2(TOKENIZER.vocab_size), abs=1e-5
    )  # 257 tokens: 8.006
    assert uniform.nats == pytest.approx(
        len(uniform.token_ids) * math.log(TOKENIZER.vocab_size), rel=1e-6
    )


def test_an_empty_text_has_no_tokens_and_no_nats():
    for options in ({}, {"window": 4}):
        score = Generator(small_model(), TOKENIZER, **options).score("", n_top=3)
        assert score == Score([], [], [], 0)
        assert (str(score.nats), str(score.bits_per_byte)) == ("0.0", "0.0")  # and not -0.0
