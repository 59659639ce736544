"""The inference model gives the logits of the original; in int8, those of the documented rounding."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.benchmarks.decode import matrix_bytes
from thinker.generation.inference_model import prepare_for_inference
from thinker.generation.int8 import Int8Linear, int8_matmul_is_exact
from thinker.model.layers import Linear

needs_exact_int8 = pytest.mark.skipif(
    not int8_matmul_is_exact(), reason="this CPU's int8 products overflow, so that they are not used"
)


def random_tensor(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tokens(rows, length, seed=0):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative_error(ours, expected):
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


# --- the copy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_logits_equal_the_models(random_model, qk_norm, tied, n_kv_heads):
    model = random_model(qk_norm=qk_norm, tie_embeddings=tied, n_kv_heads=n_kv_heads)
    copied = prepare_for_inference(model)
    tokens = random_tokens(3, 24)
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(copied(tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(copied(tokens, last_logits_only=True), expected[:, -1:], rtol=0, atol=1e-5)
        embeddings = model.embedding(tokens)
        torch.testing.assert_close(copied(embeddings=embeddings), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(copied(tokens), expected, rtol=0, atol=1e-5)  # with gradients switched on
    cache = copied.new_cache(3, 24)
    pieces = [copied(chunk, cache=cache) for chunk in tokens.split([7, 1, 1, 1, 2, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [{}, {"dtype": torch.bfloat16}, {"int8": True}], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_original_and_copy_are_independent(random_model, form, tied):
    model = random_model(tie_embeddings=tied).train()
    before = copy.deepcopy(model.state_dict())
    tokens = random_tokens(2, 10)
    drawn = torch.get_rng_state()
    copied = prepare_for_inference(model, **form)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert not copied.training
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(new, before[name]) for name, new in model.state_dict().items())

    logits, state = copied(tokens), copy.deepcopy(copied.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, count = model(tokens, targets=tokens)
    (total / count).backward()
    optimizer.step()
    assert not any(torch.equal(new, before[name]) for name, new in model.state_dict().items())  # every one learns
    assert torch.equal(copied(tokens), logits)
    assert all(torch.equal(new, state[name]) for name, new in copied.state_dict().items())


def test_dropout_is_off(random_model):
    model = random_model(dropout=0.5).train()
    tokens = random_tokens(2, 10)
    logits = prepare_for_inference(model)(tokens)
    torch.testing.assert_close(logits, model.eval()(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_bf16_logits_and_cache(random_model, tied, int8):
    model = random_model(tie_embeddings=tied)
    copied = prepare_for_inference(model, torch.bfloat16, int8)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    tokens = random_tokens(2, 20)
    cache = copied.new_cache(2, 20)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    pieces = [copied(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)]
    assert {piece.dtype for piece in pieces} == {torch.bfloat16}
    assert relative_error(torch.cat(pieces, dim=1), model(tokens).detach()) < (0.06 if int8 else 0.03)


def test_dtype_does_not_depend_on_the_models_activation_dtype(random_model):
    model = random_model()
    model.activation_dtype = torch.bfloat16
    assert prepare_for_inference(model)(random_tokens(1, 3)).dtype == torch.float32
    assert prepare_for_inference(model, torch.bfloat16)(random_tokens(1, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_int8_quantizes_all_matrices_but_the_embedding(random_model, tied):
    model = random_model(tie_embeddings=tied)
    copied = prepare_for_inference(model, int8=True)
    assert torch.equal(copied.embedding.weight, model.embedding.weight)
    assert not [name for name, module in copied.named_modules() if isinstance(module, torch.nn.Linear)]
    quantized = {name: module for name, module in copied.named_modules() if isinstance(module, Int8Linear)}
    assert len(quantized) == 4 * 2 + 1
    torch.testing.assert_close(
        quantized["lm_head"].quantized * quantized["lm_head"].scale[:, None],
        model.lm_head.weight.detach(),
        rtol=0,
        atol=model.lm_head.weight.abs().max().item() / 253,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("use_int8", [True, False], ids=["int8_matmul", "cast_weights"])
def test_int8_logits_are_within_a_few_percent(random_model, tied, use_int8):
    for seed in range(4):
        model = random_model(seed, tie_embeddings=tied)
        tokens = random_tokens(2, 20, seed)
        copied = prepare_for_inference(model, int8=True)
        if not use_int8:
            for module in copied.modules():
                module.use_int8_matmul = False
        cache = copied.new_cache(2, 20)
        logits = torch.cat([copied(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)], dim=1)
        assert 1e-4 < relative_error(logits, model(tokens).detach()) < 0.06


@needs_exact_int8
def test_int8_matrices_of_a_model_are_batch_invariant(random_model):
    copied = prepare_for_inference(random_model(), int8=True)
    for module in copied.modules():
        if isinstance(module, Int8Linear):
            x = random_tensor(5, 3, module.quantized.shape[1])
            assert all(torch.equal(module(x)[row], module(x[row])) for row in range(5))


def test_matrix_bytes(random_model):
    shape = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 96, "vocab_size": 61}
    channels = 3 * ((4 + 2 + 2) * 8 + 32 + 2 * 96 + 32) + 61  # rows of all matrices: qkv, o, gate and up, down; head
    weights = 3 * ((4 + 2 + 2) * 8 * 32 + 32 * 32 + 2 * 96 * 32 + 32 * 96) + 61 * 32
    gains = 3 * (2 * 32 + (4 + 2) * 8) + 32  # those of queries and keys stand once for each head
    for tied in (True, False):
        model = random_model(**shape, tie_embeddings=tied)
        assert matrix_bytes(prepare_for_inference(model)) == 4 * (weights + gains)
        assert matrix_bytes(prepare_for_inference(model, torch.bfloat16)) == 2 * (weights + gains)
        assert matrix_bytes(prepare_for_inference(model, int8=True)) == weights + 4 * channels + 4 * gains
    wide = random_model(d_model=256, n_layers=1)
    assert (
        0.25 < matrix_bytes(prepare_for_inference(wide, int8=True)) / matrix_bytes(prepare_for_inference(wide)) < 0.26
    )


# --- int8 -------------------------------------------------------------------------------------------------------------


def test_int8_weights_are_rounded_per_output_channel():
    weight = random_tensor(24, 40) * torch.logspace(-6, 6, 24)[:, None]  # channels of very unequal size
    linear = Int8Linear(weight)
    assert linear.scale.shape == (24,)
    torch.testing.assert_close(linear.scale, weight.abs().amax(dim=1) / 127)
    assert (linear.quantized.abs().amax(dim=1) == 127).all()  # symmetric: the largest takes the last step, never −128
    scale = linear.scale.double()[:, None]
    assert ((linear.quantized.double() * scale - weight.double()).abs() <= scale * 0.500001).all()


def documented_product(linear, x):
    """The documented product in float64: int8 activations with a scale per position, times int8 weights, rescaled."""
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    digits = (x / step).round().double()
    return digits @ linear.quantized.double().t() * step.double() * linear.scale.double()


@needs_exact_int8
@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 64), (2, 3, 100), (3, 17, 1500)])
@pytest.mark.parametrize("n_out", [1, 7, 130])
def test_int8_product_equals_the_documented_formula(shape, n_out):
    linear = Int8Linear(random_tensor(n_out, shape[-1], seed=1))
    assert linear.use_int8_matmul
    x = random_tensor(*shape, seed=2)
    y = linear(x)
    assert y.shape == (*shape[:-1], n_out)
    expected = documented_product(linear, x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("use_int8", [True, False], ids=["int8_matmul", "cast_weights"])
@given(
    rows=st.integers(1, 6),
    n_in=st.integers(1, 70),
    n_out=st.integers(1, 40),
    size=st.sampled_from([1e-20, 1e-4, 1.0, 1e4, 1e20]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(25), deadline=None)
def test_int8_error_is_within_the_rounding_bound(use_int8, rows, n_in, n_out, size, seed):
    """A bound that no other rounding could break: |Σ x·w − Σ x̂·ŵ| ≤ Σ |x|·scale/2 + |ŵ|·step/2."""
    weight, x = random_tensor(n_out, n_in, seed=seed), random_tensor(rows, n_in, seed=seed + 1, size=size)
    linear = Int8Linear(weight)
    linear.use_int8_matmul &= use_int8
    exact = x.double() @ weight.double().t()
    scale = linear.scale.double()[:, None]
    bound = x.double().abs() @ (scale / 2).expand(-1, n_in).t()
    if linear.use_int8_matmul:
        step = x.double().abs().amax(dim=1, keepdim=True) / 127
        bound = bound + (step / 2).expand(-1, n_in) @ (linear.quantized.double() * scale).abs().t()
    largest = x.double().abs() @ weight.double().abs().t()  # room for fp32's own rounding
    assert ((linear(x).double() - exact).abs() <= bound + 1e-5 * largest).all()


@needs_exact_int8
@given(
    rows=st.integers(2, 40),
    n_in=st.integers(8, 200),
    n_out=st.integers(1, 80),
    spread=st.floats(0, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=examples(40), deadline=None)
def test_int8_is_batch_invariant_bitwise(rows, n_in, n_out, spread, dtype, seed, data):
    linear = Int8Linear(random_tensor(n_out, n_in, seed=seed))
    x = random_tensor(rows, n_in, seed=seed + 1) * 10 ** (spread * random_tensor(rows, 1, seed=seed + 2).clamp(-2, 2))
    x = x.to(dtype)
    y = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], y[row]) for row in (0, rows - 1))
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows), label="rows in another order")
    assert torch.equal(linear(x[order]), y[order])
    assert torch.equal(linear(x[:, None]), y[:, None])


@pytest.mark.parametrize("use_int8", [True, False], ids=["int8_matmul", "cast_weights"])
def test_int8_of_zeros_is_zero(use_int8):
    weight, x = random_tensor(6, 16, seed=1), random_tensor(4, 16, seed=2)
    weight[2], x[1] = 0, 0
    linear, zero_weights = Int8Linear(weight), Int8Linear(torch.zeros(6, 16))
    linear.use_int8_matmul &= use_int8
    zero_weights.use_int8_matmul &= use_int8
    assert (zero_weights.scale > 0).all()  # 0/0 as an integer differs between machines
    y = linear(x)
    assert y.isfinite().all()
    assert (y[1] == 0).all()
    assert (y[:, 2] == 0).all()
    assert (y[[0, 2, 3]][:, [0, 1, 3, 4, 5]] != 0).all()
    assert torch.equal(zero_weights(x), torch.zeros(4, 6))
    assert torch.equal(zero_weights(torch.zeros(2, 16)), torch.zeros(2, 6))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-20, 1e20, 1e30, 3e36])
def test_int8_with_huge_and_tiny_activations(size):
    weight, x = random_tensor(6, 16, seed=1), random_tensor(4, 16, seed=2)
    linear = Int8Linear(weight)
    y = linear(x * size)
    assert y.isfinite().all()
    if size >= 1e-20:
        torch.testing.assert_close(y / size, linear(x), rtol=1e-5, atol=1e-5)
    else:
        assert y.abs().max() <= size * 100


def test_int8_with_huge_and_tiny_weights():
    weight, x = random_tensor(6, 16, seed=1), random_tensor(4, 16, seed=2)
    for size in (1e-20, 1e20):
        torch.testing.assert_close(Int8Linear(weight * size)(x) / size, Int8Linear(weight)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_matmul_and_cast_weights_are_close(dtype):
    linear, x = Int8Linear(random_tensor(48, 64, seed=1)), random_tensor(3, 5, 64, seed=2).to(dtype)
    fast = linear(x)
    linear.use_int8_matmul = False
    cast = linear(x)
    assert fast.dtype == cast.dtype == dtype
    assert fast.shape == cast.shape == (3, 5, 48)
    assert relative_error(fast, cast) < 0.015
    expected = x.double() @ (linear.quantized.double() * linear.scale.double()[:, None]).t()
    assert relative_error(cast, expected) < (1e-6 if dtype == torch.float32 else 0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_row_is_the_product_of_the_cast_weights(dtype):
    linear, x = Int8Linear(random_tensor(48, 64, seed=1)), random_tensor(1, 1, 64, seed=2).to(dtype)
    linear.use_int8_matmul = False
    y = torch.compile(linear, backend="eager")(x)
    expected = x.double() @ (linear.quantized.double() * linear.scale.double()[:, None]).t()
    assert (y.dtype, y.shape) == (dtype, (1, 1, 48))
    assert relative_error(y, expected) < (1e-6 if dtype == torch.float32 else 0.004)


def test_int8_with_strided_activations():
    linear, x = Int8Linear(random_tensor(48, 64, seed=1)), random_tensor(5, 64, 3, seed=2).transpose(1, 2)
    torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=1e-5)


# --- few rows in full precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 21))
def test_linear_with_few_rows_equals_f_linear(rows):
    linear = Linear(48, 30)
    for x in (
        random_tensor(rows, 48),
        random_tensor(1, rows, 48),
        random_tensor(rows, 1, 48),
        random_tensor(rows, 96)[:, ::2],
        random_tensor(48, rows).t(),
    ):
        expected = F.linear(x, linear.weight)
        with torch.no_grad():
            y = linear(x)
        assert y.shape == expected.shape
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
        # As its readers take it apart: into heads, and into gate and up.
        assert torch.equal(y.unflatten(-1, (-1, 6)).flatten(-2), y)
        assert torch.equal(y.view(*y.shape[:-1], 5, 6), y.contiguous().view(*y.shape[:-1], 5, 6))
        assert torch.equal(torch.cat(y.chunk(2, dim=-1), dim=-1), y)


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_linear_with_few_rows_and_positions(batch, length):
    linear, x = Linear(48, 30), random_tensor(batch, length, 48)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight), rtol=0, atol=1e-5)
        torch.testing.assert_close(linear(x).view(batch * length, 30), linear(x.view(-1, 48)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 16, 20])
def test_gradients_with_few_rows(rows):
    linear, x = Linear(48, 30), random_tensor(rows, 48).requires_grad_()
    linear(x).square().sum().backward()
    y = x.detach() @ linear.weight.detach().t()
    torch.testing.assert_close(linear.weight.grad, 2 * y.t() @ x.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, 2 * y @ linear.weight.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_linear_casts_its_weights_to_the_activation_dtype(rows):
    linear = Linear(48, 30)
    with torch.no_grad():
        y = linear(random_tensor(rows, 48).bfloat16())
    assert y.dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32
    assert relative_error(y, random_tensor(rows, 48) @ linear.weight.detach().t()) < 0.02
