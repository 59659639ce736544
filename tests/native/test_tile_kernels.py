"""Attention, products and the loss by kernels give the numbers of plain formulas in fp64."""

import ctypes

import pytest
import torch
from conftest import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from thinker.native import compiler, training
from thinker.native.compiler import has_compiler
from thinker.native.tiles import tile_kernels

if not has_compiler():
    pytest.skip("needs a C compiler", allow_module_level=True)

# A processor with AMX has the other form, too, which it otherwise does not use.
WITHOUT_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
HAS_TILES = training.load_training_library().tile_support() > 0
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="needs AMX or AVX512-BF16")
SHARED = [HealthCheck.function_scoped_fixture]  # the library is the same for all examples
BF16_ROUNDING = 2.0**-7  # of the largest value of a tensor


@pytest.fixture(params=["as the processor has it", "dot products"])
def library(request, monkeypatch):
    """Each form of the kernels that this processor has."""
    if request.param == "dot products":
        if training.load_training_library().tile_support() != tile_kernels.AMX:
            pytest.skip("is what this processor uses anyway")
        library = compiler.compiled("train.c", training.SIGNATURES, training.FLAG, *WITHOUT_AMX)
        for name in training.WITH_RESULT:
            getattr(library, name).restype = ctypes.c_int64
        assert library.tile_support() == 1
        monkeypatch.setattr(training, "load_training_library", lambda: library)
        monkeypatch.setattr(tile_kernels, "load_training_library", lambda: library)
    return training.load_training_library()


def heads(n_rows, n_heads, T, D, seed, is_transposed):
    """Random heads (n_rows, n_heads, T, D) in bf16, in one of the two orders in memory."""
    generator = torch.Generator().manual_seed(seed)
    if is_transposed:
        x = torch.randn(n_rows, T, n_heads, D, generator=generator).transpose(1, 2)
    else:
        x = torch.randn(n_rows, n_heads, T, D, generator=generator)
    return (1.5 * x).to(torch.bfloat16)


def plain_attention(q, k, v, scale):
    """Causal attention by its formula."""
    n_shared = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_shared, dim=1)
    v = v.repeat_interleave(n_shared, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    T = q.shape[2]
    is_future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(is_future, -torch.inf).softmax(-1) @ v


def with_gradients(function, tensors, y_grad):
    """The result of a function, and the gradients of its tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    y = function(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, y_grad.to(y.dtype))]


@needs_tiles
@pytest.mark.parametrize("shape", [
    (2, 2, 2, 1, 32), (1, 2, 2, 64, 64), (2, 4, 2, 65, 32), (1, 6, 1, 127, 64), (3, 2, 2, 129, 96),
    (1, 2, 2, 200, 128), (1, 4, 4, 333, 64), (1, 2, 1, 1100, 32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_transposed", [False, True])
def test_attention_is_that_of_the_formula(library, shape, is_transposed):
    B, H, K, T, D = shape
    q, k, v = (heads(B, n, T, D, seed, is_transposed) for seed, n in enumerate((H, K, K)))
    y_grad = heads(B, H, T, D, 3, not is_transposed)
    assert tile_kernels.has_causal_attention(q, k, v)
    ours = with_gradients(
        lambda q, k, v: tile_kernels.causal_attention(q, k, v, 0.2), (q, k, v), y_grad
    )
    doubles = [x.double() for x in (q, k, v)]
    known = with_gradients(lambda q, k, v: plain_attention(q, k, v, 0.2), doubles, y_grad)
    largest = float(known[3].abs().max())  # where others may be 0, as with one key
    for found, expected in zip(ours, known, strict=True):
        assert found.dtype == torch.bfloat16
        size = max(float(expected.abs().max()), 0.1 * largest)
        assert (found.double() - expected).abs().max() <= BF16_ROUNDING * size


@needs_tiles
@given(st.integers(1, 300), st.sampled_from([32, 64, 128]), st.integers(0, 99))
@settings(max_examples=examples(20), deadline=None)
def test_later_positions_and_threads_change_no_bit(T, D, seed):
    q, k, v = (heads(2, n, T, D, seed + n, True) for n in (4, 2, 2))
    y_grad = heads(2, 4, T, D, seed, True)
    n_threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            results.append(
                with_gradients(
                    lambda q, k, v: tile_kernels.causal_attention(q, k, v, 0.1), (q, k, v), y_grad
                )
            )
    finally:
        torch.set_num_threads(n_threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    cut = T // 2 + 1
    q[:, :, cut:] = 3
    k[:, :, cut:] = -2
    v[:, :, cut:] = 7
    y = tile_kernels.causal_attention(q, k, v, 0.1)
    assert torch.equal(y[:, :, :cut], results[0][0][:, :, :cut])


@needs_tiles
def test_a_nan_or_infinite_score_is_not_hidden(library):
    for value in (torch.nan, torch.inf):
        q, k, v = (heads(1, 2, 70, 32, seed, True) for seed in range(3))
        q[0, 1, 40, 3] = value
        results = with_gradients(
            lambda q, k, v: tile_kernels.causal_attention(q, k, v, 0.2),
            (q, k, v),
            torch.ones_like(q),
        )
        y, _, k_grad, v_grad = results
        assert y[0, 1, 40].isnan().all()
        assert y[0, 0].isfinite().all()
        assert y[0, 1, :40].isfinite().all()
        assert y[0, 1, 41:].isfinite().all()
        assert k_grad[0, 1, :40].isnan().any()
        assert v_grad[0, 1, :40].isnan().any()


@needs_tiles
def test_what_attention_leaves_to_torch():
    q, k, v = (heads(2, 2, 8, 32, seed, True) for seed in range(3))
    assert tile_kernels.has_causal_attention(q, k, v)
    assert not tile_kernels.has_causal_attention(q.float(), k.float(), v.float())
    assert not tile_kernels.has_causal_attention(q[:, :, -1:], k, v)  # a cache
    assert not tile_kernels.has_causal_attention(q[..., :16], k[..., :16], v[..., :16])
    assert not tile_kernels.has_causal_attention(q[:0], k[:0], v[:0])


@needs_tiles
@given(
    st.integers(1, 700), st.integers(1, 12), st.integers(1, 40), st.booleans(), st.integers(0, 99)
)
@example(700, 9, 2, False, 0)  # more tokens and rows than the kernel takes at a time with AMX
@example(2100, 5, 2, True, 0)  # and without
@settings(max_examples=examples(30), deadline=None, suppress_health_check=SHARED)
def test_the_gradient_of_a_weight_is_the_product(
    library, n_tokens, out_blocks, in_blocks, is_part, seed
):
    generator = torch.Generator().manual_seed(seed)
    n_out, n_in = 32 * out_blocks, 32 * in_blocks
    y_grad = torch.randn(n_tokens, n_out + 5, generator=generator).to(torch.bfloat16)
    x = torch.randn(n_tokens, n_in + 3, generator=generator).to(torch.bfloat16)
    y_grad, x = y_grad[:, :n_out], x[:, :n_in]  # rows that do not follow one another
    if not is_part:
        y_grad, x = y_grad.contiguous(), x.contiguous()
    known = y_grad.double().T @ x.double()
    results = []
    n_threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(tile_kernels.weight_gradient(y_grad, x))
    finally:
        torch.set_num_threads(n_threads)
    assert torch.equal(*results)
    assert results[0].dtype == torch.float32
    assert (results[0] - known).abs().max() <= 1e-5 * known.abs().max() + 1e-6


@needs_tiles
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_joined_product_gives_each_weight_its_gradient(has_bias):
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.nn.Parameter(torch.randn(n, 64, generator=generator) / 8) for n in (64, 32, 96)
    ]
    x = torch.randn(4, 100, 64, generator=generator).to(torch.bfloat16).requires_grad_()
    bias = None
    if has_bias:
        bias = torch.randn(192, generator=generator).to(torch.bfloat16).requires_grad_()
    y_grad = torch.randn(4, 100, 192, generator=generator).to(torch.bfloat16)
    assert tile_kernels.has_linear(x, weights)
    cast = torch.cat([weight.detach().to(torch.bfloat16) for weight in weights])
    inputs = [x, *weights, *([bias] if has_bias else [])]
    y = tile_kernels.linear(x, cast, bias, weights)
    ours = torch.autograd.grad(y, inputs, y_grad)

    doubles = [cast.double().requires_grad_(), x.detach().double().requires_grad_()]
    known = doubles[1] @ doubles[0].T
    if has_bias:
        doubles.append(bias.detach().double().requires_grad_())
        known = known + doubles[2]
    expected = torch.autograd.grad(known, doubles, y_grad.double())
    assert (y - known).abs().max() <= BF16_ROUNDING * known.abs().max()
    assert (ours[0] - expected[1]).abs().max() <= BF16_ROUNDING * expected[1].abs().max()
    joined = torch.cat(ours[1:4])
    assert joined.dtype == torch.float32
    assert (joined - expected[0]).abs().max() <= 1e-5 * expected[0].abs().max()
    if has_bias:
        assert (ours[4] - expected[2]).abs().max() <= BF16_ROUNDING * expected[2].abs().max()


@needs_tiles
def test_factors_that_do_not_fit_raise_an_error():
    x = rows_of(300, 64, 1)
    for w in (rows_of(32, 96, 2), rows_of(96, 32, 2).T, rows_of(64, 96, 2).float()):
        with pytest.raises(RuntimeError, match="no product of"):
            tile_kernels.activation_product(x, w)
    with pytest.raises(RuntimeError, match="no product of"):
        tile_kernels.activation_product(x.float(), rows_of(64, 96, 2))
    known = x @ rows_of(64, 192, 2)[:, ::2]
    found = tile_kernels.activation_product(x, rows_of(64, 192, 2)[:, ::2])
    assert (found - known).abs().max() <= BF16_ROUNDING * known.abs().max()
    assert tile_kernels.activation_product(x[:0], rows_of(64, 96, 2)).shape == (0, 96)
    assert not tile_kernels.weight_gradient(x[:0], x[:0]).any()


@needs_tiles
def test_what_linear_leaves_to_torch():
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    x = torch.zeros(1, 300, 64, dtype=torch.bfloat16)
    assert tile_kernels.has_linear(x, [weight])
    assert not tile_kernels.has_linear(x.float(), [weight])
    assert not tile_kernels.has_linear(x[:, :100], [weight])
    assert not tile_kernels.has_linear(x[..., :48], [torch.nn.Parameter(torch.zeros(64, 48))])
    assert not tile_kernels.has_linear(x, [torch.nn.Parameter(torch.zeros(65, 64))])
    assert not tile_kernels.has_linear(x, [torch.nn.Parameter(torch.zeros(64, 32))])
    assert not tile_kernels.has_linear(x, [torch.nn.Parameter(torch.zeros(64, 64).bfloat16())])
    assert not tile_kernels.has_linear(x, [weight.to_sparse().requires_grad_()])


def rows_of(n, width, seed, is_part=False):
    """Random rows in bf16, which do not follow one another if they are a part of longer ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width + 3, generator=generator).to(torch.bfloat16)[:, :width]
    return x if is_part else x.contiguous()


def with_threads(function):
    """The result of a function, which must be the same with one and with three threads."""
    n_threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(function())
    finally:
        torch.set_num_threads(n_threads)
    assert torch.equal(*results)
    return results[0]


@needs_tiles
@given(
    st.integers(1, 300), st.integers(1, 20), st.integers(1, 20), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None, suppress_health_check=SHARED)
def test_products_of_activations(
    library, n_tokens, in_blocks, out_blocks, is_part, is_transposed, seed
):
    n_in, n_out = 32 * in_blocks, 32 * out_blocks
    x = rows_of(n_tokens, n_in, seed, is_part)
    w = rows_of(n_in, n_out, seed + 1)
    if is_transposed:
        w = w.T.contiguous().T
    y = with_threads(lambda: tile_kernels.activation_product(x, w))
    known = x.double() @ w.double()
    assert y.dtype == torch.bfloat16
    assert y.shape == known.shape
    assert (y - known).abs().max() <= BF16_ROUNDING * known.abs().max()


@needs_tiles
@pytest.mark.parametrize("n_tokens", [1, 64, 65, 200])
@pytest.mark.parametrize("width", [32, 288, 544])  # the last has more panels than a piece of work
def test_products_that_end_with_swiglu(library, n_tokens, width):
    x, w = rows_of(n_tokens, 96, 1), rows_of(2 * width, 96, 2)
    gate_up = torch.full((n_tokens, 2 * width), 7.0, dtype=torch.bfloat16)
    y = with_threads(
        lambda: tile_kernels.activation_product(x, w.T, tile_kernels.SWIGLU, gate_up).clone()
    )
    known = x.double() @ w.double().T
    assert (gate_up - known).abs().max() <= BF16_ROUNDING * known.abs().max()
    # of what was rounded
    gate, up = (half.requires_grad_() for half in gate_up.double().chunk(2, dim=-1))
    result = torch.nn.functional.silu(gate) * up
    assert (y - result).abs().max() <= BF16_ROUNDING * result.abs().max()

    y_grad, down = rows_of(n_tokens, 64, 3), rows_of(64, width, 4)
    grad = with_threads(
        lambda: tile_kernels.activation_product(y_grad, down, tile_kernels.SWIGLU_BACKWARD, gate_up)
    )
    expected = torch.autograd.grad(result, (gate, up), y_grad.double() @ down.double())
    expected = torch.cat(expected, dim=-1)
    assert (grad - expected).abs().max() <= BF16_ROUNDING * expected.abs().max()


@needs_tiles
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_or_infinite_activation_is_not_hidden(library, value):
    x = rows_of(70, 32, 1)
    x[3, 5] = value
    w = rows_of(64, 32, 2)
    gate_up = torch.empty(70, 64, dtype=torch.bfloat16)
    is_finite = torch.arange(70) != 3
    for y in (
        tile_kernels.activation_product(x, w.T),
        tile_kernels.activation_product(x, w.T, tile_kernels.SWIGLU, gate_up),
        tile_kernels.activation_product(x, w[:32], tile_kernels.SWIGLU_BACKWARD, gate_up),
    ):
        assert torch.equal(y.isfinite().all(-1), is_finite)


@needs_tiles
@pytest.mark.parametrize("frozen", [None, "x", "up", "down"])
def test_an_mlp_of_products_has_the_gradients_of_its_formula(frozen):
    if not tile_kernels.has_fast_activation_product(0):
        pytest.skip("was not measured on this processor")
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.nn.Parameter(torch.randn(shape, generator=generator) / 8)
        weights[name].requires_grad_(name != frozen)
    x = rows_of(300, 64, 5).view(3, 100, 64).requires_grad_(frozen != "x")
    y_grad = rows_of(300, 64, 6).view(3, 100, 64)
    assert tile_kernels.has_swiglu_mlp(x, *weights.values())
    gate, up, down = (weight.detach().bfloat16() for weight in weights.values())
    y = tile_kernels.swiglu_mlp(x, (torch.cat((gate, up)), down), list(weights.values()))
    inputs = [each for each in (x, *weights.values()) if each.requires_grad]
    ours = torch.autograd.grad(y, inputs, y_grad)

    doubles = [each.detach().bfloat16().double() for each in (x, *weights.values())]
    for double, each in zip(doubles, (x, *weights.values())):
        double.requires_grad_(each.requires_grad)
    hidden = torch.nn.functional.silu(doubles[0] @ doubles[1].T) * (doubles[0] @ doubles[2].T)
    known = hidden @ doubles[3].T
    needed = [each for each in doubles if each.requires_grad]
    expected = torch.autograd.grad(known, needed, y_grad.double())
    assert (y - known).abs().max() <= 2 * BF16_ROUNDING * known.abs().max()
    for found, grad in zip(ours, expected, strict=True):
        assert (found - grad).abs().max() <= 2 * BF16_ROUNDING * grad.abs().max()


@needs_tiles
def test_what_an_mlp_leaves_to_torch(monkeypatch):
    monkeypatch.setattr(tile_kernels, "has_fast_activation_product", lambda n: True)
    x = torch.zeros(1, 300, 64, dtype=torch.bfloat16)
    wide, narrow, down = (
        torch.nn.Parameter(torch.zeros(shape)) for shape in ((96, 64), (80, 64), (64, 96))
    )
    assert tile_kernels.has_swiglu_mlp(x, wide, wide, down)
    assert not tile_kernels.has_swiglu_mlp(x, wide, narrow, down)
    assert not tile_kernels.has_swiglu_mlp(x, narrow, narrow, down)
    assert not tile_kernels.has_swiglu_mlp(x[:, :100], wide, wide, down)
    assert not tile_kernels.has_swiglu_mlp(x, wide, wide, torch.nn.Parameter(torch.zeros(64, 64)))
    assert not tile_kernels.has_swiglu_mlp(x.float(), wide, wide, down)
    monkeypatch.setattr(tile_kernels, "has_fast_activation_product", lambda n: False)
    assert not tile_kernels.has_swiglu_mlp(x, wide, wide, down)


@given(
    st.integers(1, 60),
    st.integers(1, 700),
    st.sampled_from([0.1, 5.0, 60.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_loss_and_its_gradient(n_rows, n_tokens, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (size * torch.randn(n_rows, n_tokens, generator=generator)).to(dtype)
    targets = torch.randint(-1, n_tokens, (n_rows,), generator=generator)
    doubles = logits.double().requires_grad_()
    log_probs = doubles.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    known = -log_probs * (targets >= 0)
    (expected,) = torch.autograd.grad(known.sum(), doubles)
    losses, nothing = training.loss_and_gradient(logits.clone(), targets, False)
    assert nothing is None
    again, grad = training.loss_and_gradient(logits.clone(), targets, True)
    assert torch.equal(losses, again)
    assert losses.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(losses.double(), known.detach(), rtol=2e-6, atol=2e-5)
    tolerance = 2e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(grad.double(), expected, rtol=2 * tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_or_infinite_logit_makes_the_loss_nan(value):
    logits = torch.randn(3, 100)
    logits[1, 50] = value
    losses, grad = training.loss_and_gradient(logits, torch.tensor([1, 2, 3]), True)
    assert losses.isnan().tolist() == [False, True, False]
    assert grad.isnan().any(-1).tolist() == [False, True, False]
