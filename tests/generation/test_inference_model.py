"""The form for decoding says what the Thinker says; in int8, what the documented rounding makes of it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.generation.inference_model import matrix_bytes, prepare_for_inference
from thinker.generation.int8 import Int8Linear, integer_products_are_exact
from thinker.model.linear import Linear

needs_exact_integers = pytest.mark.skipif(
    not integer_products_are_exact(), reason="this CPU's int8 products overflow, so that they are not used"
)


def draw(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_tokens(rows, length, seed=0):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative_error(ours, known):
    return ((ours.double() - known.double()).norm() / known.double().norm()).item()


# --- the snapshot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_says_what_the_thinker_says(random_model, qk_norm, tied, n_kv_heads):
    model = random_model(qk_norm=qk_norm, tie_embeddings=tied, n_kv_heads=n_kv_heads)
    snapshot = prepare_for_inference(model)
    tokens = draw_tokens(3, 24)
    with torch.no_grad():
        known = model(tokens)
        torch.testing.assert_close(snapshot(tokens), known, rtol=0, atol=1e-5)
        torch.testing.assert_close(snapshot(tokens, last_logits_only=True), known[:, -1:], rtol=0, atol=1e-5)
        embeddings = model.embedding(tokens)
        torch.testing.assert_close(snapshot(embeddings=embeddings), known, rtol=0, atol=1e-5)
    torch.testing.assert_close(snapshot(tokens), known, rtol=0, atol=1e-5)  # with gradients switched on
    cache = snapshot.new_cache(3, 24)
    pieces = [snapshot(chunk, cache=cache) for chunk in tokens.split([7, 1, 1, 1, 2, 12], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), known, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [{}, {"dtype": torch.bfloat16}, {"int8": True}], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_original_and_the_snapshot_do_not_touch_each_other(random_model, form, tied):
    model = random_model(tie_embeddings=tied).train()
    before = copy.deepcopy(model.state_dict())
    tokens = draw_tokens(2, 10)
    drawn = torch.get_rng_state()
    snapshot = prepare_for_inference(model, **form)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert not snapshot.training
    assert not any(parameter.requires_grad for parameter in snapshot.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(new, before[name]) for name, new in model.state_dict().items())

    said, state = snapshot(tokens), copy.deepcopy(snapshot.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, count = model(tokens, targets=tokens)
    (total / count).backward()
    optimizer.step()
    assert not any(torch.equal(new, before[name]) for name, new in model.state_dict().items())  # every one learns
    assert torch.equal(snapshot(tokens), said)
    assert all(torch.equal(new, state[name]) for name, new in snapshot.state_dict().items())


def test_drops_nothing_out(random_model):
    model = random_model(dropout=0.5).train()
    tokens = draw_tokens(2, 10)
    said = prepare_for_inference(model)(tokens)
    torch.testing.assert_close(said, model.eval()(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_bf16_is_bf16_throughout_and_close(random_model, tied, int8):
    model = random_model(tie_embeddings=tied)
    snapshot = prepare_for_inference(model, torch.bfloat16, int8)
    assert {parameter.dtype for parameter in snapshot.parameters()} == {torch.bfloat16}
    tokens = draw_tokens(2, 20)
    cache = snapshot.new_cache(2, 20)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    pieces = [snapshot(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)]
    assert {piece.dtype for piece in pieces} == {torch.bfloat16}
    assert relative_error(torch.cat(pieces, dim=1), model(tokens).detach()) < (0.06 if int8 else 0.03)


def test_runs_in_its_own_dtype_whatever_the_thinkers_activations_were(random_model):
    model = random_model()
    model.activation_dtype = torch.bfloat16
    assert prepare_for_inference(model)(draw_tokens(1, 3)).dtype == torch.float32
    assert prepare_for_inference(model, torch.bfloat16)(draw_tokens(1, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_int8_quantizes_every_matrix_and_the_head_but_not_the_look_up(random_model, tied):
    model = random_model(tie_embeddings=tied)
    snapshot = prepare_for_inference(model, int8=True)
    assert torch.equal(snapshot.embedding.weight, model.embedding.weight)
    assert not [name for name, module in snapshot.named_modules() if isinstance(module, torch.nn.Linear)]
    quantized = {name: module for name, module in snapshot.named_modules() if isinstance(module, Int8Linear)}
    assert len(quantized) == 4 * 2 + 1
    torch.testing.assert_close(
        quantized["lm_head"].quantized * quantized["lm_head"].scale[:, None],
        model.lm_head.weight.detach(),
        rtol=0,
        atol=model.lm_head.weight.abs().max().item() / 253,
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("integers", [True, False], ids=["by_integers", "by_casting"])
def test_int8_logits_are_within_a_few_percent(random_model, tied, integers):
    for seed in range(4):
        model = random_model(seed, tie_embeddings=tied)
        tokens = draw_tokens(2, 20, seed)
        snapshot = prepare_for_inference(model, int8=True)
        if not integers:
            for module in snapshot.modules():
                module.by_integers = False
        cache = snapshot.new_cache(2, 20)
        said = torch.cat([snapshot(chunk, cache=cache) for chunk in tokens.split([14, 1, 5], dim=1)], dim=1)
        assert 1e-4 < relative_error(said, model(tokens).detach()) < 0.06


@needs_exact_integers
def test_every_int8_matrix_of_a_model_gives_each_row_what_it_gives_it_alone(random_model):
    snapshot = prepare_for_inference(random_model(), int8=True)
    for module in snapshot.modules():
        if isinstance(module, Int8Linear):
            x = draw(5, 3, module.quantized.shape[1])
            assert all(torch.equal(module(x)[row], module(x[row])) for row in range(5))


def test_matrix_bytes_counts_what_a_step_reads(random_model):
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


def test_each_weight_is_within_half_a_step_of_its_own_channels_scale():
    weight = draw(24, 40) * torch.logspace(-6, 6, 24)[:, None]  # channels of very unequal size
    linear = Int8Linear(weight)
    assert linear.scale.shape == (24,)
    torch.testing.assert_close(linear.scale, weight.abs().amax(dim=1) / 127)
    assert (linear.quantized.abs().amax(dim=1) == 127).all()  # symmetric: the largest takes the last step, never −128
    scale = linear.scale.double()[:, None]
    assert ((linear.quantized.double() * scale - weight.double()).abs() <= scale * 0.500001).all()


def documented(linear, x):
    """The documented product in float64: activations rounded by a scale for each position, integers, both scales."""
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    digits = (x / step).round().double()
    return digits @ linear.quantized.double().t() * step.double() * linear.scale.double()


@needs_exact_integers
@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 64), (2, 3, 100), (3, 17, 1500)])
@pytest.mark.parametrize("n_out", [1, 7, 130])
def test_int8_product_is_that_of_the_documented_rounding(shape, n_out):
    linear = Int8Linear(draw(n_out, shape[-1], seed=1))
    assert linear.by_integers
    x = draw(*shape, seed=2)
    y = linear(x)
    assert y.shape == (*shape[:-1], n_out)
    known = documented(linear, x)
    torch.testing.assert_close(y.double(), known, rtol=1e-6, atol=1e-6 * known.abs().max().item())


@pytest.mark.parametrize("integers", [True, False], ids=["by_integers", "by_casting"])
@given(
    rows=st.integers(1, 6),
    n_in=st.integers(1, 70),
    n_out=st.integers(1, 40),
    size=st.sampled_from([1e-20, 1e-4, 1.0, 1e4, 1e20]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_int8_is_off_by_half_a_step_of_each_factor_at_most(integers, rows, n_in, n_out, size, seed):
    """A bound that no other rounding could break: |Σ x·w − Σ x̂·ŵ| ≤ Σ |x|·scale/2 + |ŵ|·step/2."""
    weight, x = draw(n_out, n_in, seed=seed), draw(rows, n_in, seed=seed + 1, size=size)
    linear = Int8Linear(weight)
    linear.by_integers &= integers
    exact = x.double() @ weight.double().t()
    scale = linear.scale.double()[:, None]
    bound = x.double().abs() @ (scale / 2).expand(-1, n_in).t()
    if linear.by_integers:
        step = x.double().abs().amax(dim=1, keepdim=True) / 127
        bound = bound + (step / 2).expand(-1, n_in) @ (linear.quantized.double() * scale).abs().t()
    largest = x.double().abs() @ weight.double().abs().t()  # room for fp32's own rounding
    assert ((linear(x).double() - exact).abs() <= bound + 1e-5 * largest).all()


@needs_exact_integers
@given(
    rows=st.integers(2, 40),
    n_in=st.integers(8, 200),
    n_out=st.integers(1, 80),
    spread=st.floats(0, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_those_beside_it_to_the_last_bit(rows, n_in, n_out, spread, dtype, seed, data):
    linear = Int8Linear(draw(n_out, n_in, seed=seed))
    x = draw(rows, n_in, seed=seed + 1) * 10 ** (spread * draw(rows, 1, seed=seed + 2).clamp(-2, 2))
    x = x.to(dtype)
    y = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], y[row]) for row in (0, rows - 1))
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows), label="rows in another order")
    assert torch.equal(linear(x[order]), y[order])
    assert torch.equal(linear(x[:, None]), y[:, None])


@pytest.mark.parametrize("integers", [True, False], ids=["by_integers", "by_casting"])
def test_int8_of_zeros_is_zero(integers):
    weight, x = draw(6, 16, seed=1), draw(4, 16, seed=2)
    weight[2], x[1] = 0, 0
    linear, nothing = Int8Linear(weight), Int8Linear(torch.zeros(6, 16))
    linear.by_integers &= integers
    nothing.by_integers &= integers
    assert (nothing.scale > 0).all()  # what 0/0 becomes as an integer is left to the machine
    y = linear(x)
    assert y.isfinite().all()
    assert (y[1] == 0).all()
    assert (y[:, 2] == 0).all()
    assert (y[[0, 2, 3]][:, [0, 1, 3, 4, 5]] != 0).all()
    assert torch.equal(nothing(x), torch.zeros(4, 6))
    assert torch.equal(nothing(torch.zeros(2, 16)), torch.zeros(2, 6))


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-20, 1e20, 1e30, 3e36])
def test_int8_takes_huge_and_tiny_activations(size):
    weight, x = draw(6, 16, seed=1), draw(4, 16, seed=2)
    linear = Int8Linear(weight)
    y = linear(x * size)
    assert y.isfinite().all()
    if size >= 1e-20:
        torch.testing.assert_close(y / size, linear(x), rtol=1e-5, atol=1e-5)
    else:
        assert y.abs().max() <= size * 100


def test_int8_of_huge_and_tiny_weights():
    weight, x = draw(6, 16, seed=1), draw(4, 16, seed=2)
    for size in (1e-20, 1e20):
        torch.testing.assert_close(Int8Linear(weight * size)(x) / size, Int8Linear(weight)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_by_integers_and_by_casting_are_close(dtype):
    linear, x = Int8Linear(draw(48, 64, seed=1)), draw(3, 5, 64, seed=2).to(dtype)
    fast = linear(x)
    linear.by_integers = False
    cast = linear(x)
    assert fast.dtype == cast.dtype == dtype
    assert fast.shape == cast.shape == (3, 5, 48)
    assert relative_error(fast, cast) < 0.015
    known = x.double() @ (linear.quantized.double() * linear.scale.double()[:, None]).t()
    assert relative_error(cast, known) < (1e-6 if dtype == torch.float32 else 0.005)


def test_int8_takes_activations_that_are_strided_in_memory():
    linear, x = Int8Linear(draw(48, 64, seed=1)), draw(5, 64, 3, seed=2).transpose(1, 2)
    torch.testing.assert_close(linear(x), linear(x.contiguous()), rtol=0, atol=1e-5)


# --- few rows in full precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 21))
def test_linear_of_few_rows_is_linear(rows):
    linear = Linear(48, 30)
    for x in (draw(rows, 48), draw(1, rows, 48), draw(rows, 1, 48), draw(rows, 96)[:, ::2], draw(48, rows).t()):
        known = F.linear(x, linear.weight)
        with torch.no_grad():
            y = linear(x)
        assert y.shape == known.shape
        torch.testing.assert_close(y, known, rtol=0, atol=1e-5)
        # As its readers take it apart: into heads, and into gate and up.
        assert torch.equal(y.unflatten(-1, (-1, 6)).flatten(-2), y)
        assert torch.equal(y.view(*y.shape[:-1], 5, 6), y.contiguous().view(*y.shape[:-1], 5, 6))
        assert torch.equal(torch.cat(y.chunk(2, dim=-1), dim=-1), y)


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_linear_of_a_few_rows_by_a_few_positions(batch, length):
    linear, x = Linear(48, 30), draw(batch, length, 48)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), F.linear(x, linear.weight), rtol=0, atol=1e-5)
        torch.testing.assert_close(linear(x).view(batch * length, 30), linear(x.view(-1, 48)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 16, 20])
def test_gradients_flow_through_few_rows(rows):
    linear, x = Linear(48, 30), draw(rows, 48).requires_grad_()
    linear(x).square().sum().backward()
    y = x.detach() @ linear.weight.detach().t()
    torch.testing.assert_close(linear.weight.grad, 2 * y.t() @ x.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, 2 * y @ linear.weight.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_linear_casts_its_weights_to_the_activations(rows):
    linear = Linear(48, 30)
    with torch.no_grad():
        y = linear(draw(rows, 48).bfloat16())
    assert y.dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32
    assert relative_error(y, draw(rows, 48) @ linear.weight.detach().t()) < 0.02
