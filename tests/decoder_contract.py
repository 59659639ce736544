"""What every decoder promises. Tests of each room and feature run these checks on theirs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from conftest import random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, SamplingParams
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.sampler import sample_steps
from thinker.generation.sequence import Sequence
from thinker.model import Thinker

TOKENIZER = make_tokenizer("byte", [])
TOLERANCE = 1e-4  # of logits in fp32


@dataclass(frozen=True)
class DecoderCase:
    """A decoder, made for a model with random weights."""

    name: str
    new: Callable[[Thinker], Decoder]
    attention: str = "full"

    def model(self) -> Thinker:
        return random_model(
            vocab_size=264, head_dim=16, max_seq_len=64, attention=self.attention, norm_mean=0.3
        )


def texts(rows: int, length: int = 12) -> torch.Tensor:
    return torch.randint(250, (rows, length), generator=torch.Generator().manual_seed(rows))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def steps_equal_the_plain_pass(case: DecoderCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)
    decoder = case.new(model)
    cache = decoder.model.new_cache(2, 64)
    assert decoder.supports(type(cache))
    assert_close(decoder.prefill(tokens[:, :5], cache), expected[:, 4:5])
    for position in range(5, 12):
        now = slice(position, position + 1)
        assert_close(decoder.step(tokens[:, now], cache), expected[:, now])
    assert cache.lengths == [12, 12]


def a_prefill_may_be_split_anywhere(case: DecoderCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)[:, -1:]
    decoder = case.new(model)
    for lengths in ((12,), (1, 11), (11, 1), (4, 4, 4)):
        cache = decoder.model.new_cache(2, 64)
        for part in tokens.split(lengths, dim=1):
            logits = decoder.prefill(part, cache)
        assert_close(logits, expected)


def rows_do_not_depend_on_each_other(case: DecoderCase) -> None:
    """Rows of unequal lengths, of which some leave."""
    model, tokens = case.model(), texts(3)
    with torch.no_grad():
        expected = model(tokens)
    decoder = case.new(model)
    lengths = [4, 9, 6]
    cache = decoder.model.new_cache(1, 64)
    decoder.prefill(tokens[:1, :4], cache)
    for row in (1, 2):
        other = decoder.model.new_cache(1, 64)
        decoder.prefill(tokens[row : row + 1, : lengths[row]], other)
        cache.concat_rows(other)
    rows = [0, 1, 2]
    for step in range(3):
        at = [lengths[row] + step for row in rows]
        logits = decoder.step(tokens[rows, at][:, None], cache)
        assert_close(logits[:, 0], expected[rows, at])
        if step == 1:
            rows = [2, 0]
            cache.select([2, 0])


def drafts_are_read_in_one_step(case: DecoderCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)
    decoder = case.new(model)
    if not decoder.is_exact:
        return
    cache = decoder.model.new_cache(2, 64, slack=4)
    decoder.prefill(tokens[:, :5], cache)
    assert_close(decoder.step(tokens[:, 5:9], cache), expected[:, 5:9])
    cache.truncate([7, 6])
    rows = torch.stack((tokens[0, 7:9], tokens[1, 6:8]))
    found = decoder.step(rows, cache)
    assert_close(found[0], expected[0, 7:9])
    assert_close(found[1], expected[1, 6:8])


def samples_are_those_of_the_sampler(case: DecoderCase) -> None:
    model, tokens = case.model(), texts(3)
    decoder = case.new(model)
    cache = decoder.model.new_cache(3, 64)
    logits = decoder.prefill(tokens, cache)
    kinds = [{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 2}]
    for mixed in ([0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 1, 2]):
        params = [SamplingParams(30, seed=row, **kinds[kind]) for row, kind in enumerate(mixed)]
        sequences = [
            Sequence(row, Completion(""), own, tokens[row].tolist(), 30, TOKENIZER)
            for row, own in enumerate(params)
        ]
        found = decoder.sample(sequences, cache, logits, 1)
        expected = sample_steps(sequences, logits, 1, model)
        for (one,), (other,) in zip(found, expected, strict=True):
            assert one[0] == other[0]
            assert abs(one[1] - other[1]) < TOLERANCE
            assert one[2] == other[2]
        assert cache.lengths == [12] * 3  # the last token is not read


CHECKS = [
    steps_equal_the_plain_pass,
    a_prefill_may_be_split_anywhere,
    rows_do_not_depend_on_each_other,
    drafts_are_read_in_one_step,
    samples_are_those_of_the_sampler,
]
