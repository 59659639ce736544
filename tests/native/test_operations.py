"""Each kernel equals its plain form, for shapes that divide by nothing."""

import math
import os
import platform
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.generation.sampler import SamplingParams
from thinker.generation.sampler import sample as plain_sample
from thinker.native.compiler import has_compiler, machine_flags
from thinker.native.operations import linear, sample
from thinker.native.quantization import pack, quantize, quantized_linear, unpack

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
sizes = st.one_of(st.integers(1, 140), st.sampled_from([32, 64, 96, 128, 192, 257, 515]))
seeds = st.integers(0, 1000)


def random_tensor(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(ours, known, largest):
    """Within fp32 rounding of sums whose terms have a total size of `largest`."""
    assert ((ours.double() - known.double()).abs() <= 1e-6 * largest.double() + 1e-30).all()


@given(rows=st.integers(1, 40), n_in=sizes, n_out=sizes, has_bias=st.booleans(), seed=seeds)
@settings(max_examples=examples(60), deadline=None)
def test_products_in_fp32_and_bf16(rows, n_in, n_out, has_bias, seed):
    x, weight = random_tensor(rows, n_in, seed=seed), random_tensor(n_out, n_in, seed=seed + 1)
    bias = random_tensor(n_out, seed=seed + 2) if has_bias else None
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(linear(x, weight, bias), y, F.linear(x.abs(), weight.abs()) + 1)
    for row in (0, rows - 1):  # a row does not depend on the others, to the last bit
        assert torch.equal(linear(x[row : row + 1], weight)[0], linear(x, weight)[row])
    x, weight = x.bfloat16(), weight.bfloat16()  # the kernel rounds its input
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(
        linear(x.float(), weight, bias), y, F.linear(x.float().abs(), weight.float().abs()) + 1
    )


@given(rows=st.integers(1, 40), n_in=sizes, n_out=sizes, bits=st.sampled_from([8, 4]), seed=seeds)
@settings(max_examples=examples(80), deadline=None)
def test_products_in_8_and_4_bits(rows, n_in, n_out, bits, seed):
    x, weight = random_tensor(rows, n_in, seed=seed), random_tensor(n_out, n_in, seed=seed + 1)
    quantized = quantize(weight, bits)
    packed = pack(quantized, bits)
    assert all(torch.equal(one, other) for one, other in zip(unpack(packed)[:2], quantized[:2]))
    y = linear(x, packed)
    assert_close(y, quantized_linear(x, quantized), F.linear(x.abs(), quantized.dequantize().abs()))
    for row in (0, rows - 1):  # a row does not depend on the others, to the last bit
        assert torch.equal(linear(x[row : row + 1], packed)[0], y[row])


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_rounded_within_half_a_step(bits):
    weight = random_tensor(24, 80, seed=0) * torch.logspace(-6, 6, 24)[:, None]
    quantized = quantize(weight, bits)
    step = quantized.scale.double().abs().repeat_interleave(32, dim=1)[:, :80]
    error = (quantized.dequantize().double() - weight.double()).abs()
    is_clipped = (
        quantized.codes.flatten(1)[:, :80].abs() >= (1 << bits - 1) - 1
    )  # the largest may be cut
    assert (error[~is_clipped] <= 0.5001 * step[~is_clipped]).all()
    assert (error <= (0.51 if bits == 8 else 1.6) * step).all()
    assert not quantize(torch.zeros(3, 40), bits).dequantize().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_numbers_are_not_lost(dtype, value):
    for rows in (1, 5):
        x = random_tensor(rows, 70, seed=1)
        x[0, 3] = value
        y = linear(x, random_tensor(20, 70, seed=2).to(dtype))
        assert not y[0].isfinite().any()
        assert y[1:].isfinite().all()


@given(
    vocab=st.one_of(st.integers(1, 70), st.sampled_from([3072, 5003])), scale=st.sampled_from([0.1, 3.0, 60.0]),
    temperature=st.sampled_from([0.0, 0.2, 0.8, 1.0, 3.0]), rows=st.integers(1, 4), extra=st.integers(0, 5), seed=seeds,
)  # fmt: skip
@settings(max_examples=examples(80), deadline=None)
def test_sampling_draws_the_same_tokens(vocab, scale, temperature, rows, extra, seed):
    logits, rng = scale * random_tensor(rows, vocab + extra, seed=seed), random.Random(seed)
    uniforms = [rng.choice([0.0, rng.random(), 1 - 2**-53]) for _ in range(rows)]
    tokens, logprobs = sample(logits, vocab, [temperature] * rows, uniforms)
    params = SamplingParams(temperature=temperature)
    known = plain_sample(
        logits[:, :vocab], params, torch.tensor(uniforms, dtype=torch.float64), None, None
    )
    assert tokens == known.tolist()
    of_tokens = logits[:, :vocab].double().log_softmax(-1).gather(1, known[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs).double(), of_tokens, rtol=1e-6, atol=1e-6)


def test_sampling_never_draws_an_impossible_token():
    logits = torch.full((1, 40), -math.inf)
    logits[0, [5, 17]] = 0.0
    for uniform in (0.0, 0.4999, 0.5, 1 - 2**-53):
        (token,), (logprob,) = sample(logits, 40, [1.0], [uniform])
        assert token == (5 if uniform < 0.5 else 17)
        assert logprob == pytest.approx(-math.log(2))
    assert sample(logits, 40, [0.0], [0.0])[0] == [5]  # ties: the lowest id
    logits[0, 5] = math.nan
    assert math.isnan(sample(logits, 40, [0.0], [0.0])[1][0])


def run_again(flags, environment):
    """These tests, in a process whose compiler has other flags and these environment variables."""
    code = (
        "import sys, pytest, torch, thinker.native.compiler as compiler\n"
        f"compiler.FLAGS = (*{flags!r}, *compiler.FLAGS[2:])\n"
        f"sys.exit(pytest.main(['-o', 'addopts=', '-q', '-p', 'no:cacheprovider', {__file__!r}, '-k', 'not again']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64"], ids=["avx2", "sse2"])
def test_again_for_older_cpus(march, tmp_path):
    """Without AVX-512 and its instructions for 8 bits and bf16. With -O3, GCC would take 20 s."""
    run_again(["-O1", f"-march={march}", "-fopenmp"], {"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.more
def test_again_on_one_thread_as_on_a_mac(tmp_path):
    flags = ["-O1", *machine_flags("Darwin", platform.machine())]
    run_again(flags, {"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.more
@pytest.mark.skipif(find_spec("ziglang") is None, reason="needs pip install ziglang")
def test_again_with_clang(tmp_path):
    clang = tmp_path / "clang"
    clang.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang cc "$@"\n')
    clang.chmod(0o755)
    flags = ["-O1", *machine_flags("Darwin", platform.machine())]
    run_again(flags, {"XDG_CACHE_HOME": str(tmp_path), "CC": str(clang)})
