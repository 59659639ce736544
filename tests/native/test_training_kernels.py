"""The fused operations of training give the numbers of plain torch, with any number of threads."""

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from thinker.model.positions import apply_rotary_emb
from thinker.native import training
from thinker.native.compiler import has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def plain_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def plain_heads(qkv, H, K, q_weight, k_weight, eps, rope):
    heads = qkv.unflatten(-1, (H + 2 * K, -1)).transpose(1, 2)
    q, k, v = heads.split((H, K, K), dim=1)
    q, k = (x if w is None else plain_norm(x, w, eps) for x, w in ((q, q_weight), (k, k_weight)))
    return apply_rotary_emb(q, rope), apply_rotary_emb(k, rope), v


def plain_swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def check(fused, plain, tensors, *others):
    """Compare outputs and gradients with those of the plain form in fp64. `tensors`: the first
    arguments or None."""
    results = []
    for function, dtype in ((fused, None), (plain, torch.float64)):
        inputs = [
            x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors
        ]
        outputs = function(*inputs, *others)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(5)
        grads = [
            torch.randn(x.shape, generator=generator).to(tensors[0].dtype).to(x.dtype)
            for x in outputs
        ]
        inputs = [x for x in inputs if x is not None]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, grads)])
    for ours, known in zip(*results, strict=True):
        tolerance = 2**-7 if ours.dtype == torch.bfloat16 else 1e-5
        scale = known.abs().max().item()
        torch.testing.assert_close(
            ours.double(), known, rtol=tolerance, atol=tolerance * scale + 1e-30
        )
    return results[0]


@given(
    st.integers(1, 120),
    st.integers(1, 70),
    st.sampled_from([1e-3, 1.0, 1e3]),
    DTYPES,
    st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_rms_norm(rows, width, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, rows, width, generator=generator) * size).to(dtype)
    check(lambda x, w: training.rms_norm(x, w, 1e-6), lambda x, w: plain_norm(x, w, 1e-6),
          [x, torch.randn(width, generator=generator)])  # fmt: skip


@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40),
    st.booleans(), st.sampled_from([None, "shared", "by sequence"]), DTYPES, st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_heads(B, T, groups, K, half, has_norm, tables, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    H, D = groups * K, 2 * half
    qkv = torch.randn(B, T, (H + 2 * K) * D, generator=generator).to(dtype)
    weights = [torch.randn(D, generator=generator) if has_norm else None for _ in range(2)]
    angles = torch.rand(*((T,) if tables == "shared" else (B, 1, T)), half, generator=generator)
    rope = (
        torch.cat((angles.cos(), angles.cos()), -1).to(dtype),
        torch.cat((-angles.sin(), angles.sin()), -1).to(dtype),
    )
    rope = rope if tables else None

    def fused(qkv, q_weight, k_weight):
        return training.rotate_heads(qkv, H, K, q_weight, k_weight, 1e-6, rope)

    def plain(qkv, q_weight, k_weight):
        return plain_heads(
            qkv, H, K, q_weight, k_weight, 1e-6, rope and tuple(table.double() for table in rope)
        )

    check(fused, plain, [qkv, *weights])


@given(
    st.integers(1, 120),
    st.integers(1, 70),
    st.sampled_from([1e-3, 1.0, 60.0]),
    DTYPES,
    st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_swiglu(rows, width, size, dtype, seed):
    gate_up = torch.randn(2, rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * size
    check(training.swiglu, plain_swiglu, [gate_up.to(dtype)])


@given(
    st.integers(1, 3000), st.sampled_from([0.01, 0.2, 0.9, 1 - 1e-12]), DTYPES, st.integers(0, 99)
)
@settings(max_examples=examples(60), deadline=None)
def test_dropout(n, p, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, generator=generator).to(dtype).requires_grad_()
    torch.manual_seed(seed)
    y = training.dropout(x, p)
    kept = y != 0
    torch.testing.assert_close(y[kept], (x / (1 - p))[kept])
    grad = torch.randn(2, n, generator=generator).to(dtype)
    (x_grad,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(x_grad, torch.where(kept | (x == 0), grad / (1 - p), 0))
    torch.manual_seed(seed)
    assert torch.equal(training.dropout(x, p), y)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_its_probability_and_no_pattern(p):
    torch.manual_seed(0)
    n = 1_000_000
    x = torch.ones(n)
    drawn = [training.dropout(x, p) for _ in range(16)]
    halves = [
        training._drop(x, torch.tensor([number << 32]), p) for number in range(4)
    ]  # differ in the upper half
    masks = torch.stack(drawn + halves) == 0
    assert abs(masks.float().mean(1) - p).max() < 5 * (p * (1 - p) / n) ** 0.5
    scores = (masks.float() - p) / (p * (1 - p)) ** 0.5
    for lag in (1, 2, 16, 128, 512, 4096):  # neighbours, and the same place in other rows
        assert (scores[:, lag:] * scores[:, :-lag]).mean(1).abs().max() < 5 / n**0.5
    between = scores @ scores.T / n  # calls with other seeds
    assert (between - torch.eye(20) * between).abs().max() < 5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype):
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(3, 37, 4 * 24, generator=generator).to(dtype)
    weights = [torch.randn(24, generator=generator) for _ in range(2)]
    width_weight = torch.randn(96, generator=generator)
    angles = torch.rand(37, 12, generator=generator)
    rope = (
        torch.cat((angles.cos(), angles.cos()), -1).to(dtype),
        torch.cat((-angles.sin(), angles.sin()), -1).to(dtype),
    )
    results = []
    n_threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            torch.manual_seed(0)
            results.append(
                [
                    *check(lambda x, w: training.rms_norm(x, w, 1e-6), lambda x, w: plain_norm(x, w, 1e-6),
                           [qkv, width_weight]),
                    *check(lambda x, q, k: training.rotate_heads(x, 2, 1, q, k, 1e-6, rope),
                           lambda x, q, k: plain_heads(x, 2, 1, q, k, 1e-6, tuple(t.double() for t in rope)),
                           [qkv, *weights]),
                    *check(training.swiglu, plain_swiglu, [qkv]),
                    training.dropout(qkv, 0.3),
                ]
            )  # fmt: skip
    finally:
        torch.set_num_threads(n_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_zeros_and_non_finite_numbers():
    x = torch.zeros(2, 5, requires_grad=True)
    weight = torch.ones(5, requires_grad=True)
    y = training.rms_norm(x, weight, 1e-6)
    y.sum().backward()
    assert y.abs().max() == 0
    assert torch.isfinite(x.grad).all()
    for bad in (float("nan"), float("inf")):
        assert not training.rms_norm(torch.full((1, 5), bad), weight, 1e-6).isfinite().any()
        assert not training.swiglu(torch.full((1, 6), bad)).isfinite().any()


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        qkv, weight = torch.empty(2, 5, 64, requires_grad=True), torch.ones(16, requires_grad=True)
        q, k, v = training.rotate_heads(qkv, 2, 1, weight, weight, 1e-6, None)
        assert (q.shape, k.shape, v.shape) == ((2, 2, 5, 16), (2, 1, 5, 16), (2, 1, 5, 16))
        hidden = training.swiglu(training.rms_norm(qkv, torch.ones(64), 1e-6))
        (training.dropout(hidden, 0.1).sum() + q.sum()).backward()
        assert qkv.grad.shape == qkv.shape
