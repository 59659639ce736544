"""The inference model returns the logits of the original; in 8 and 4 bits, up to the documented
rounding."""

import copy

import pytest
import torch
import torch.nn.functional as F

from thinker.benchmarks.speed.decode import matrix_bytes
from thinker.generation.decoders.inference_linear import FewRowsLinear, NativeLinear
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.generation.decoders.quantized_linear import QuantizedLinear
from thinker.model.layers import Linear
from thinker.native.compiler import has_compiler
from thinker.native.quantization import quantize, quantized_linear

needs_kernels = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
KERNELS = [pytest.param(True, id="native", marks=needs_kernels), pytest.param(False, id="torch")]


def random_tensor(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tokens(rows, length, seed=0):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative_error(ours, expected):
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


# --- the copy
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("native", KERNELS)
def test_logits_equal_the_models(random_model, qk_norm, tied, n_kv_heads, native):
    model = random_model(qk_norm=qk_norm, tie_embeddings=tied, n_kv_heads=n_kv_heads)
    copied = fuse_for_inference(model, native=native)
    tokens = random_tokens(3, 24)
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(copied(tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            copied(tokens, last_logits_only=True), expected[:, -1:], rtol=0, atol=1e-5
        )
        embeddings = model.embedding(tokens)
        torch.testing.assert_close(copied(embeddings=embeddings), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        copied(tokens), expected, rtol=0, atol=1e-5
    )  # with gradients switched on
    cache = copied.new_cache(3, 24)
    pieces = [copied(chunk, cache=cache) for chunk in tokens.split([7, 1, 1, 1, 2, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)


REPLACED = {  # methods that an experiment may replace on one module, by its path
    "blocks.1.attention": ("query_key_value", "project", "attend", "forward"),
    "blocks.1.mlp": ("forward",),
    "blocks.0": ("forward",),
    "": ("embed", "forward_blocks"),
}


@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path in REPLACED for method in REPLACED[path]]
)
@pytest.mark.parametrize("native", KERNELS)
def test_methods_replaced_on_a_module_are_run(random_model, path, method, native):
    model = random_model()
    module = model.get_submodule(path)
    original, calls = getattr(module, method), []

    def twice(*arguments, **options):
        calls.append(method)
        result = original(*arguments, **options)
        if isinstance(result, tuple):
            return tuple(2 * each for each in result)
        return 2 * result

    tokens = random_tokens(1, 9)
    with torch.no_grad():
        plain = model(tokens)
        setattr(module, method, twice)
        expected = model(tokens)
        assert not torch.allclose(expected, plain)
        copied = fuse_for_inference(model, native=native)
        calls.clear()
        torch.testing.assert_close(copied(tokens), expected, rtol=0, atol=1e-5)
        assert calls
        decoder = NativeDecoder(copied)
        cache = copied.new_cache(1, 12)
        copied(tokens[:, :8], cache=cache)
        found = decoder.step(tokens[:, 8:], cache)
    torch.testing.assert_close(found, expected[:, 8:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", [{}, {"dtype": torch.bfloat16}, {"bits": 8}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_original_and_copy_are_independent(random_model, form, tied):
    model = random_model(tie_embeddings=tied).train()
    before = copy.deepcopy(model.state_dict())
    tokens = random_tokens(2, 10)
    drawn = torch.get_rng_state()
    copied = fuse_for_inference(model, **form)
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
    assert not any(
        torch.equal(new, before[name]) for name, new in model.state_dict().items()
    )  # every one learns
    assert torch.equal(copied(tokens), logits)
    assert all(torch.equal(new, state[name]) for name, new in copied.state_dict().items())


def test_dropout_is_off(random_model):
    model = random_model(dropout=0.5).train()
    tokens = random_tokens(2, 10)
    logits = fuse_for_inference(model)(tokens)
    torch.testing.assert_close(logits, model.eval()(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("native", KERNELS)
def test_bf16_logits_and_cache(random_model, tied, bits, native):
    model = random_model(tie_embeddings=tied)
    copied = fuse_for_inference(model, torch.bfloat16, bits, native)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    tokens = random_tokens(2, 20)
    cache = copied.new_cache(2, 20)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    pieces = [copied(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)]
    assert {piece.dtype for piece in pieces} == {torch.bfloat16}
    assert relative_error(torch.cat(pieces, dim=1), model(tokens).detach()) < (
        0.06 if bits else 0.03
    )


def test_dtype_does_not_depend_on_the_models_activation_dtype(random_model):
    model = random_model()
    model.activation_dtype = torch.bfloat16
    assert fuse_for_inference(model)(random_tokens(1, 3)).dtype == torch.float32
    assert fuse_for_inference(model, torch.bfloat16)(random_tokens(1, 3)).dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bits", [8, 4])
def test_all_matrices_but_the_embedding_are_quantized(random_model, tied, bits):
    model = random_model(tie_embeddings=tied)
    copied = fuse_for_inference(model, bits=bits, native=True)
    assert torch.equal(copied.embedding.weight, model.embedding.weight)
    assert not [
        name for name, module in copied.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    quantized = {
        name: module
        for name, module in copied.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert len(quantized) == 4 * 2 + 1
    error = relative_error(quantized["lm_head"].dequantize(), model.lm_head.weight.detach())
    assert error < {8: 0.01, 4: 0.1}[bits]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("native", KERNELS)
@pytest.mark.parametrize(("bits", "most"), [(8, 0.06), (4, 0.6)])
def test_quantized_logits_are_close(random_model, tied, native, bits, most):
    for seed in range(4):
        model = random_model(seed, tie_embeddings=tied)
        tokens = random_tokens(2, 20, seed)
        copied = fuse_for_inference(model, bits=bits, native=native)
        cache = copied.new_cache(2, 20)
        logits = torch.cat(
            [copied(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)], dim=1
        )
        assert 1e-4 < relative_error(logits, model(tokens).detach()) < most


def test_matrix_bytes(random_model):
    shape = {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "d_ff": 96,
        "vocab_size": 64,
    }
    weights = 3 * ((4 + 2 + 2) * 8 * 32 + 32 * 32 + 2 * 96 * 32 + 32 * 96) + 64 * 32
    gains = 3 * (2 * 32 + (4 + 2) * 8) + 32  # those of queries and keys stand once for each head
    for tied in (True, False):
        model = random_model(**shape, tie_embeddings=tied)
        assert matrix_bytes(fuse_for_inference(model)) == 4 * (weights + gains)
        assert matrix_bytes(fuse_for_inference(model, torch.bfloat16)) == 2 * (weights + gains)
        if has_compiler():
            for bits in (8, 4):  # and a scale of 16 bits for each 32 weights
                copied = fuse_for_inference(model, bits=bits, native=True)
                assert matrix_bytes(copied) == weights * (bits + 0.5) / 8 + 4 * gains


# --- quantized layers
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@needs_kernels
def test_native_and_cast_weights_are_close(dtype, bits):
    weight, bias, x = (
        random_tensor(49, 70, seed=1),
        random_tensor(49).to(dtype),
        random_tensor(3, 5, 70, seed=2),
    )
    native, cast = (QuantizedLinear(weight, bias, bits, native=native) for native in (True, False))
    assert torch.equal(native.dequantize(), cast.dequantize())
    assert torch.equal(native.dequantize(), quantize(weight, bits).dequantize())
    fast, slow = native(x.to(dtype)), cast(x.to(dtype))
    assert fast.dtype == slow.dtype == dtype
    assert fast.shape == slow.shape == (3, 5, 49)
    assert relative_error(fast, slow) < 0.015
    exact = quantized_linear(x.to(dtype).float().flatten(0, 1), quantize(weight, bits)) + bias
    assert relative_error(fast.flatten(0, 1), exact) < (1e-6 if dtype == torch.float32 else 0.005)
    for size in (1e-44, 1e-20, 1e20):
        assert native((x * size).to(dtype)).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_row_is_the_product_of_the_cast_weights(dtype, bits):
    linear, x = (
        QuantizedLinear(random_tensor(48, 64, seed=1), None, bits, False),
        random_tensor(1, 1, 64).to(dtype),
    )
    y = torch.compile(linear, backend="eager")(x)
    assert (y.dtype, y.shape) == (dtype, (1, 1, 48))
    assert relative_error(y, x.double() @ linear.dequantize().double().t()) < (
        1e-6 if dtype == torch.float32 else 0.004
    )


# --- few rows in full precision
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 21))
@pytest.mark.parametrize("kind", [FewRowsLinear, pytest.param(NativeLinear, marks=needs_kernels)])
def test_linear_with_few_rows_equals_f_linear(rows, kind):
    linear = kind(48, 30)
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
    linear, x = FewRowsLinear(48, 30), random_tensor(batch, length, 48)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight), rtol=0, atol=1e-5)
        torch.testing.assert_close(
            linear(x).view(batch * length, 30), linear(x.view(-1, 48)), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("rows", [1, 4, 16, 20])
def test_gradients_with_few_rows(rows):
    linear, x = FewRowsLinear(48, 30), random_tensor(rows, 48).requires_grad_()
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
