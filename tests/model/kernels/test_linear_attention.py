"""Linear attention is the masked quadratic form of its features, however it is cut, and nears
softmax attention."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from thinker.model.kernels import linear_attention as module
from thinker.model.kernels.linear_attention import LinearState, linear_attention, random_features


def drawn(B, H, K, T, D, seed=0, dtype=torch.float32, value_dim=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, K, T, D), (B, K, T, value_dim or D)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def reference(q, k, v, features, documents=None):
    """φ(q)φ(k)ᵀ under the mask, in fp64, as it stands in the paper."""
    q, k, v, omega = (x.double() for x in (q, k, v, features))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
    q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
    phi_q, phi_k = (
        (x @ omega.T - (x**2).sum(-1, keepdim=True) / 2).exp() / len(omega) ** 0.5 for x in (q, k)
    )
    weights = (phi_q @ phi_k.mT).tril()  # (B, H, T, T)
    if documents is not None:
        weights = weights * (documents[:, None, :, None] == documents[:, None, None])
    return weights @ v / weights.sum(-1, keepdim=True)


def in_parts(q, k, v, features, lengths, documents=None, chunk=64):
    """The positions in calls of these lengths, the last of them again and again, with the state
    handed on."""
    ys, state, at = [], None, 0
    lengths = itertools.chain(lengths, itertools.repeat(lengths[-1]))
    while at < q.shape[2]:
        part = slice(at, at := at + next(lengths))
        ids = None if documents is None else documents[:, part]
        y, state = linear_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], features, state, ids, chunk
        )
        ys.append(y)
    return torch.cat(ys, dim=2), state


def assert_near(ours, known, tolerance):
    """To the scale of the whole tensor; what is zero but for rounding has that of its terms, which
    are about 1."""
    assert (ours - known).abs().max() <= tolerance * max(known.abs().max().item(), 0.1)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(
    B=st.integers(1, 2), K=st.integers(1, 2), G=st.integers(1, 3), T=st.integers(1, 40), D=st.integers(1, 9),
    m=st.integers(1, 20), chunk=st.integers(1, 41), span=st.integers(1, 4), seed=st.integers(0, 999),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4), n_documents=st.integers(0, 5),
    double=st.booleans(), value_dim=st.integers(1, 5),
)  # fmt: skip
def test_chunks_parts_and_single_positions_equal_the_quadratic_form(
    B, K, G, T, D, m, chunk, span, seed, lengths, n_documents, double, value_dim
):
    dtype, tolerance = (torch.float64, 1e-12) if double else (torch.float32, 1e-5)
    inputs = drawn(B, K * G, K, T, D, seed, dtype, value_dim)
    features, generator = random_features(m, D, seed), torch.Generator().manual_seed(seed)
    documents = (
        torch.randint(n_documents, (B, T), generator=generator).sort().values + 1000 * seed
        if n_documents
        else None
    )
    known = reference(*inputs, features, documents)
    grad = torch.randn(known.shape, generator=generator)
    known_grads = torch.autograd.grad(known, inputs, grad.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPAN", span)
        results = [
            linear_attention(*inputs, features, document_ids=documents, chunk=chunk),
            in_parts(*inputs, features, lengths, documents, chunk),
            in_parts(*inputs, features, [1], documents),
        ]
    for y, state in results:
        assert y.dtype == state.sums.dtype == dtype
        assert_near(y, known, tolerance)
        for ours, right in zip(torch.autograd.grad(y, inputs, grad.to(dtype)), known_grads):
            assert ours.dtype == dtype
            assert_near(ours, right, tolerance)
        decay = (state.shift - results[0][1].shift).to(dtype).exp()
        assert_near(state.sums * decay, results[0][1].sums, tolerance)


def test_gradients_are_those_of_finite_differences():
    inputs, features = drawn(1, 2, 1, 7, 3, dtype=torch.float64), random_features(5, 3, 0)
    documents = torch.tensor([[0, 0, 0, 0, 0, 2, 2]])
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x, features, chunk=3)[0], inputs)
    assert torch.autograd.gradcheck(
        lambda *x: linear_attention(*x, features, None, documents, 3)[0], inputs
    )


@pytest.mark.parametrize("scale", [1, 300])
@pytest.mark.parametrize("at", [1, 5, 16, 39])
def test_later_keys_change_nothing_before_them(at, scale):
    (q, k, v), features = drawn(2, 4, 2, 40, 8), random_features(16, 8, 0)
    before, _ = linear_attention(q, k, v, features, chunk=16)
    k, v = k.clone(), v.clone()
    k[:, :, at:] = scale * torch.randn_like(k[:, :, at:])
    v[:, :, at:] *= -scale
    after, _ = linear_attention(q, k, v, features, chunk=16)
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    assert not torch.allclose(before[:, :, at:], after[:, :, at:])


def test_rows_of_a_batch_are_independent():
    (q, k, v), features = drawn(3, 2, 1, 50, 8), random_features(16, 8, 0)
    k = k * torch.tensor([0.1, 30, 3])[:, None, None, None]
    together, state = linear_attention(q, k, v, features, chunk=16)
    for row in range(3):
        one = slice(row, row + 1)
        alone, own = linear_attention(q[one], k[one], v[one], features, chunk=16)
        torch.testing.assert_close(together[one], alone)
        torch.testing.assert_close(state.sums[one], own.sums)
        torch.testing.assert_close(state.shift[one], own.shift)


@torch.no_grad()
def test_the_state_does_not_grow_and_neither_does_the_work():
    T, D, m = 65536, 8, 16
    (q, k, v), features = drawn(1, 2, 1, T, D), random_features(m, D, 0)
    sizes, works, state = [], [], None
    for t in range(0, T, 4096):
        part = slice(t, t + 4096)
        y, state = linear_attention(q[:, :, part], k[:, :, part], v[:, :, part], features, state)
        sizes.append([tuple(x.shape) for x in (state.sums, state.shift)])
        with FlopCounterMode(display=False) as counter:
            linear_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], features, state)
        works.append(counter.get_total_flops())
    assert sizes == [[(1, 1, m, D + 1), (1, 1, 1, 1)]] * 16
    assert works == works[:1] * 16
    assert works[0] <= 25 * m * D
    last = reference(
        q[:, :, -1:], k[:, :, :1], v[:, :, :1], features
    )  # of one key, to have its shape
    phi_q, phi_k = (
        torch.exp(x.double() * D**-0.25 @ features.double().T) for x in (q[0, :, -1], k[0, 0])
    )
    weights = (
        phi_q @ phi_k.T * torch.exp(-k[0, 0].double().square().sum(-1) / (2 * D**0.5))
    )  # (H, T)
    assert_near(
        y[:, :, -1:],
        (weights @ v[0, 0].double() / weights.sum(-1, keepdim=True)).view_as(last),
        1e-5,
    )
    whole, end = linear_attention(q, k, v, features)
    assert_near(whole[:, :, -4096:], y, 1e-5)
    assert_near(end.sums, state.sums, 1e-5)


def test_time_and_memory_are_linear():
    features = random_features(16, 8, 0)
    flops, kept = {}, {}
    for T in (4096, 8192, 16384):
        storages = {}

        def pack(x, storages=storages):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            FlopCounterMode(display=False) as counter,
        ):
            linear_attention(*drawn(1, 2, 1, T, 8), features)[0].sum().backward()
        flops[T], kept[T] = counter.get_total_flops(), sum(storages.values())
    assert 4 * flops[4096] == 2 * flops[8192] == flops[16384]
    assert kept[16384] < 4.1 * kept[4096]


def log_reference(q, k, v, features):
    """As the reference, by logarithms, which no norm can overflow. Also what φ's floor would take
    away.

    Returns: the outputs, and of each row the logarithm of its weights' sum over that of all
    features at their largest.
    """
    q, k, v, omega = (x.double() for x in (q, k, v, features))
    q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
    log_q, log_k = q @ omega.T, k @ omega.T - (k**2).sum(-1, keepdim=True) / 2
    log_weights = (log_q[..., :, None, :] + log_k[..., None, :, :]).logsumexp(-1)
    future = torch.ones(log_weights.shape[-2:], dtype=torch.bool).triu(1)
    log_weights = log_weights.masked_fill(future, -torch.inf)
    sound = log_weights.logsumexp(-1) - log_q.amax(-1) - log_k.amax(-1).cummax(-1).values
    return log_weights.softmax(-1) @ v, sound


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    norms=st.lists(st.floats(0.1, 600), min_size=1, max_size=30), chunk=st.integers(1, 31), seed=st.integers(0, 999),
)  # fmt: skip
def test_large_norms_stay_finite_and_right(norms, chunk, seed):
    D, m = 16, 12
    (q, k, v), features = (
        drawn(1, 1, 1, len(norms), D, seed, torch.float64),
        random_features(m, D, seed),
    )
    sizes = torch.tensor(norms, dtype=torch.float64)[:, None]
    q, k = (F.normalize(x.detach(), dim=-1) * sizes for x in (q, k))
    known, sound = log_reference(q, k, v, features)
    for dtype, tolerance in (
        (torch.float64, 1e-7),
        (torch.float32, 0.1),
    ):  # fp32 knows ‖k‖²/2 = 45000 to 0.004
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        (y, _), (single, _) = (
            linear_attention(*inputs, features, chunk=chunk),
            in_parts(*inputs, features, [1]),
        )
        for each in (y, single):
            for tensor in (each, *torch.autograd.grad(each.square().sum(), inputs)):
                assert tensor.isfinite().all()
            assert (each <= v.cummax(2).values + 1e-5).all()  # always a mean of values seen
            assert (each >= v.cummin(2).values - 1e-5).all()
            assert (
                ((each - known).abs() <= tolerance)
                .all(-1)[sound > math.log(module.FLOOR) + 25]
                .all()
            )
        if dtype == torch.float64:
            torch.testing.assert_close(y, single)


@pytest.mark.parametrize("norm", [1, 10, 20, 100, 500])
def test_gradients_at_large_norms(norm):
    """Against the reference by logarithms where that is sound, which at norm 20 still is nearly
    everywhere."""
    (q, k, v), features = drawn(1, 1, 1, 40, 64, dtype=torch.float64), random_features(64, 64, 0)
    q, k = ((F.normalize(x.detach(), dim=-1) * norm).requires_grad_() for x in (q, k))
    known, sound = log_reference(q, k, v, features)
    sound = sound > math.log(module.FLOOR) + 25
    grad = torch.randn_like(known) * sound[..., None]
    right = torch.autograd.grad(known, (q, k, v), grad)
    ours = torch.autograd.grad(linear_attention(q, k, v, features, chunk=16)[0], (q, k, v), grad)
    for mine, each in zip(ours, right):
        assert_near(mine, each, 1e-6)
    assert norm > 20 or sound.double().mean() > 0.9


def test_a_key_of_small_norm_is_not_lost_behind_a_large_one_nor_a_document_behind_another():
    D = 8
    features, values = random_features(16, D, 0), torch.tensor([1.0, 2, 3, 4]).view(1, 1, 4, 1)
    q = k = torch.tensor([300, 300, 1e-3, 300])[:, None] * F.normalize(
        torch.ones(1, 1, 4, D), dim=-1
    )
    y, _ = linear_attention(q, k, values, features)
    torch.testing.assert_close(y.flatten(), torch.tensor([1, 1.5, 3, 3]))
    for lengths, first in itertools.product(([4], [1], [2, 2], [3, 1]), (0, 10**6)):
        y, _ = in_parts(q, k, values, features, lengths, torch.tensor([[5, 7, 7, 8]]) + first)
        torch.testing.assert_close(y.flatten(), torch.tensor([1.0, 2, 3, 4]))


@pytest.mark.parametrize("parts", [[70], [1], [33, 5]])
def test_bf16_is_near_fp32(parts):
    inputs, features = drawn(2, 4, 2, 70, 32, dtype=torch.bfloat16), random_features(64, 32, 0)
    y, state = in_parts(*inputs, features.bfloat16().float(), parts)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    known, _ = in_parts(*exact, features.bfloat16().float(), [70])
    assert (y.dtype, state.sums.dtype, state.shift.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert_near(y, known, 0.005)
    grad = torch.randn_like(y)
    for ours, right in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(known, exact, grad.float())
    ):
        assert ours.dtype == torch.bfloat16
        assert_near(ours, right, 0.02)


def test_an_empty_state_is_none():
    (q, k, v), features = drawn(2, 4, 2, 5, 8, value_dim=3), random_features(6, 8, 0)
    y, state = linear_attention(q, k, v, features, LinearState.empty((2, 2, 6, 3), "cpu"))
    known, _ = linear_attention(q, k, v, features)
    assert torch.equal(y, known)
    assert state.sums.shape == (2, 2, 6, 4)


@given(m=st.integers(1, 40), D=st.integers(1, 20), seed=st.integers(0, 2**40))
@settings(max_examples=examples(30), deadline=None)
def test_features_are_orthogonal_in_blocks_and_repeatable(m, D, seed):
    features = random_features(m, D, seed)
    assert features.shape == (m, D)
    assert features.dtype == torch.float32
    for block in features.double().split(D):
        directions = F.normalize(block, dim=-1)
        torch.testing.assert_close(
            directions @ directions.T, torch.eye(len(block)).double(), atol=1e-6, rtol=0
        )
    torch.manual_seed(0)
    assert torch.equal(features, random_features(m, D, seed))
    assert not torch.equal(features, random_features(m, D, seed + 1))


def test_features_have_the_lengths_and_directions_of_gaussians():
    D = 16
    rows = torch.cat([random_features(40, D, seed) for seed in range(500)]).double()  # (20000, D)
    squares = rows.square().sum(-1)  # χ² with D degrees of freedom: mean D, variance 2D
    assert squares.mean().item() == pytest.approx(D, rel=0.01)
    assert squares.var().item() == pytest.approx(2 * D, rel=0.05)
    assert (rows.T @ rows / len(rows) - torch.eye(D)).abs().max() < 0.05
    assert rows.mean(0).abs().max() < 0.05


def estimates(x, y, features):
    """φ(x)·φ(y) of each of the features (seeds, m, D), for x, y that are scaled already."""
    phi = [(features @ z - z.square().sum() / 2).exp() for z in (x, y)]
    return (phi[0] * phi[1]).mean(-1)


def test_the_product_of_features_is_an_unbiased_softmax_kernel():
    D, m, seeds = 8, 8, 4000
    features = torch.stack([random_features(m, D, seed) for seed in range(seeds)]).double()
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        q, k = torch.randn(2, D, generator=generator, dtype=torch.float64)
        q, k = (F.normalize(x, dim=0) * 1.2 * D**0.25 for x in (q, k))
        right = torch.exp(q @ k / D**0.5)
        ours = estimates(q * D**-0.25, k * D**-0.25, features)
        assert abs(ours.mean() - right) < 4 * ours.std() / seeds**0.5  # 4 standard errors
        assert ours.std() < 0.15 * right * seeds**0.5  # an interval that says something


@torch.no_grad()
def test_the_error_against_softmax_attention_falls_as_one_over_the_root_of_the_features():
    counts, D = (16, 64, 256, 1024), 16
    q, k, v = drawn(2, 2, 2, 64, D)
    q, k = (
        0.4 * q,
        0.4 * k,
    )  # the variance of a product of features has a factor exp(‖q + k‖²) before its 1/m
    known = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    errors = [
        sum(
            (linear_attention(q, k, v, random_features(m, D, seed))[0] - known).square().mean()
            for seed in range(24)
        )
        for m in counts
    ]
    x, y = torch.tensor(counts).double().log(), torch.tensor(errors).double().log() / 2
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    print(slope, errors)
    assert -0.65 < slope < -0.35, (slope, errors)
