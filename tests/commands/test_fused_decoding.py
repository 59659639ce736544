"""The GPU campaign's fused kernels of decoding, in Triton's interpreter: their values are those of
a plain model."""

import importlib.util
import os
import time

import pytest
import torch

from thinker.benchmarks.contenders import stream
from thinker.benchmarks.gpu import fused_decoding
from thinker.benchmarks.gpu.fused_decoding import NO_TRITON, REHEARSED_TRIALS, SHAPES, Tiles
from thinker.benchmarks.gpu.gpu_training import Campaign

CPU = torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, but no GPU")
CHOICES = [{name: tiles[0] for name, tiles in REHEARSED_TRIALS.items()}]  # pieces of whole rows
CHOICES += [{name: tiles[-1] for name, tiles in REHEARSED_TRIALS.items()}]  # and of parts
ONE_QUERY_PER_KEY = SHAPES["tiny"]._replace(n_kv_heads=4)


def interpret(function, *args):
    """What a function of this module yields in a process where Triton interprets."""
    return list(stream(function, *args, deadline=time.monotonic() + 600, is_fresh=True))


def yield_steps(shape, dtype, is_int8):
    os.environ["TRITON_INTERPRET"] = "1"
    model = fused_decoding.FusedModel(shape, CPU, dtype, is_int8)
    for choice in CHOICES:
        yield fused_decoding.measure_step(model, choice, overlap=False, n_steps=1)


@needs_triton
@pytest.mark.parametrize(
    ("shape", "dtype", "is_int8", "tolerance"),
    [
        (SHAPES["tiny"]._replace(n_layers=2), torch.float32, False, 2e-6),
        (SHAPES["tiny"], torch.float32, True, 2e-6),
        (ONE_QUERY_PER_KEY, torch.float32, False, 2e-6),
        (ONE_QUERY_PER_KEY, torch.bfloat16, False, 0.02),
    ],
    ids=["grouped", "int8", "ungrouped", "bf16"],
)
def test_a_step_is_that_of_a_plain_model(shape, dtype, is_int8, tolerance):
    results = interpret(yield_steps, shape, dtype, is_int8)
    assert len(results) == len(CHOICES)
    for result in results:
        assert "error" not in result
        assert result["relative_error"] < tolerance


def yield_attention(lengths):
    os.environ["TRITON_INTERPRET"] = "1"
    for tiles in (Tiles(8, 1, 2), Tiles(4, 4, 2)):
        yield fused_decoding.measure_attention(SHAPES["tiny"], lengths, torch.float32, tiles)


@needs_triton
def test_attention_reads_what_each_text_has():
    results = interpret(yield_attention, torch.tensor([1, 9, 32]))
    assert [result["relative_error"] < 2e-6 for result in results] == [True, True]


def yield_counts(n_draws):
    os.environ["TRITON_INTERPRET"] = "1"
    shape = SHAPES["tiny"]._replace(vocab_size=4)
    model = fused_decoding.FusedModel(shape, CPU, torch.float32, is_int8=False)
    model.head *= 2
    model.temperature = 2.0
    head = model.launch("head", {}, Tiles(4, 64, 4), overlap=False)
    counts = [0] * 4
    for draw in range(n_draws):
        model.position.fill_(draw)
        head.run()
        counts[int(model.best_tokens[0])] += 1
    yield {"counts": counts, "logits": model.logits.tolist()}


@needs_triton
def test_tokens_are_drawn_with_their_probabilities():
    n_draws = 300
    [result] = interpret(yield_counts, n_draws)
    logits, shares = torch.tensor(result["logits"]), torch.tensor(result["counts"]) / n_draws
    expected = (logits / 2).softmax(0)
    assert (expected - logits.softmax(0)).abs().max() > 0.15  # so the temperature shows
    torch.testing.assert_close(shares, expected, atol=0.1, rtol=0)


@pytest.mark.skipif(HAS_TRITON, reason="needs a machine without Triton")
def test_without_triton_a_rehearsal_says_so():
    campaign = Campaign(CPU, "fp32", True, {"eager": True})
    results = list(fused_decoding.fused_decoding(campaign, time.monotonic() + 600))
    assert results == [{"name": "kernels", "note": NO_TRITON}]
