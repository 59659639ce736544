import functools

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import _muon

from thinker.native import training as native
from thinker.native.compiler import has_compiler
from thinker.training.optim import muon
from thinker.training.optim.muon import Muon, normalize_rows, orthogonalize
from thinker.training.optim.orthogonalize import POLAR_EXPRESS_COEFFICIENTS

TORCHS = [(3.4445, -4.7750, 2.0315)]

SHAPES = [(16, 16), (24, 16), (16, 24), (16, 16), (24, 16), (40, 8)]


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def moved(
    optimizer: torch.optim.Optimizer, mine: list[torch.nn.Parameter], steps: int = 4
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        for parameter in mine:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in mine]


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "weight_decay": 0.3}, {"momentum": 0.5}]
)
def test_it_moves_every_matrix_as_torchs_own_does(options, monkeypatch):
    """Momentum, decay and step size: with torch's own orthogonalisation put in, and rows left as
    they come out."""

    def torchs_own(x):
        each = [_muon._zeropower_via_newtonschulz(matrix, TORCHS[0], 5, 1e-7) for matrix in x]
        return torch.stack(each).float()

    monkeypatch.setattr(muon, "orthogonalize", torchs_own)
    monkeypatch.setattr(muon, "normalize_rows", lambda updates, means, *_: (updates, means))
    mine, theirs = parameters(1), parameters(1)
    ours = moved(Muon(mine, dtype=torch.float32, lr=0.1, **options), mine)
    peer = moved(torch.optim.Muon(theirs, lr=0.1, adjust_lr_fn="original", **options), theirs)
    for a, b in zip(ours, peer):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_its_state_is_torchs_own_and_a_number_a_row():
    mine, theirs = parameters(2), parameters(2)
    ours, peer = Muon(mine, dtype=torch.float32), torch.optim.Muon(theirs)
    moved(ours, mine), moved(peer, theirs)
    a, b = ours.state_dict(), peer.state_dict()
    assert a["param_groups"][0].keys() == b["param_groups"][0].keys()
    for index in b["state"]:
        assert a["state"][index].keys() == {*b["state"][index].keys(), "row_second_moment"}
        assert a["state"][index]["row_second_moment"].shape == (len(mine[index]), 1)
        assert torch.equal(
            a["state"][index]["momentum_buffer"], b["state"][index]["momentum_buffer"]
        )


def test_a_parameter_without_a_gradient_stays():
    mine = parameters(3)
    before = mine[1].detach().clone()
    optimizer = Muon(mine, dtype=torch.float32)
    mine[0].grad = torch.ones_like(mine[0])
    optimizer.step()
    assert torch.equal(mine[1], before)
    assert len(optimizer.state) == 1


def spectrum(kind: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A matrix as gradients are: without structure, of falling singular values, or of few."""
    x = torch.randn(rows, columns, generator=generator)
    if kind == "random":
        return x
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    rank = torch.arange(1.0, 1 + min(rows, columns))
    return u @ torch.diag(rank**-0.7 if kind == "falling" else (rank < 4).float()) @ v


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["random", "falling", "few"]), st.integers(1, 3), st.integers(2, 24), st.integers(2, 24),
    st.floats(-12, 12), st.integers(0, 2**31),
)  # fmt: skip
def test_singular_values_come_near_one_and_the_directions_stay(kind, n, rows, columns, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.stack([spectrum(kind, rows, columns, generator) for _ in range(n)]) * 10.0**scale
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    y = orthogonalize(x)
    inside = u.mT @ y.double() @ v.mT  # (n, r, r): diagonal where the singular vectors stayed
    diagonal = inside.diagonal(dim1=1, dim2=2)
    norm = s.pow(4).sum(1, keepdim=True) ** 0.25
    large = s > 0.011 * norm
    assert ((diagonal > 0.72) & (diagonal < 1.28))[large].all()
    assert (diagonal < 1.28).all()
    off = inside - torch.diag_embed(diagonal)
    assert (off * (large[:, None] & large[:, :, None])).abs().max() < 1e-3


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (128, 344), (512, 128)])
@pytest.mark.parametrize("kind", ["random", "falling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_iterations_are_as_near_as_torchs_five(rows, columns, kind, dtype):
    x = spectrum(kind, rows, columns, torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    ours = orthogonalize(x[None].to(dtype))[0].float()
    peer = _muon._zeropower_via_newtonschulz(x, TORCHS[0], 5, 1e-7).float()
    assert (ours - u @ v).norm() < 1.1 * (peer - u @ v).norm()


def test_each_quintic_is_the_best_on_what_the_one_before_leaves():
    """The error of the best odd quintic takes its extreme value four times, with alternating sign
    (Chebyshev)."""
    low, high = 0.01, 1.0
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        sigma = torch.linspace(low, high, 200_001, dtype=torch.float64)
        error = a * sigma + b * sigma**3 + c * sigma**5 - 1
        worst = error.abs().max()
        at = error.abs() > 0.999 * worst
        signs = error[at].sign()
        assert 1 + int((signs[1:] != signs[:-1]).sum()) == 4
        low, high = 1 - float(worst), 1 + float(worst)
    assert (low, high) == (pytest.approx(0.73, abs=0.005), pytest.approx(1.27, abs=0.005))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0, 0.99),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_rows_are_divided_by_their_own_root_mean_square(n, rows, columns, beta, steps, seed):
    """Against the paper's lines (Li et al. 2025, algorithm 1), a row at a time, bias correction
    included."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(
        -3, 2, (rows, 1), generator=generator
    )  # rows of very different size
    kept = torch.zeros(n, rows, 1)
    means = torch.zeros(n, rows, dtype=torch.float64)
    for step in range(1, steps + 1):
        updates = torch.randn(n, rows, columns, generator=generator) * size
        moved_by, kept = normalize_rows(updates, kept, 1 - beta)
        for matrix in range(n):
            expected = updates[matrix].double()
            for row in range(rows):
                means[matrix, row] = (
                    beta * means[matrix, row] + (1 - beta) * expected[row].square().mean()
                )
                expected[row] /= (means[matrix, row] / (1 - beta**step)).sqrt()
            expected *= updates[matrix].double().norm() / expected.norm()
            torch.testing.assert_close(moved_by[matrix].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_bad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normalized_by_a_compiled_program_too(monkeypatch, dtype, is_bad):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = muon._compiled.__wrapped__()
    for shape in [(3, 8, 5), (1, 8, 5), (3, 5, 8)]:
        generator = torch.Generator().manual_seed(4)
        updates = torch.randn(shape, generator=generator).to(dtype)
        means = torch.rand(*shape[:2], 1, generator=generator)
        skip = torch.tensor(is_bad)
        arguments = updates, means, skip.logical_not() * 0.05, skip, None
        for ours, known in zip(compiled(*arguments), normalize_rows(*arguments)):
            torch.testing.assert_close(ours, known)
            assert ours.dtype == torch.float32


def _momentum_case(shape, is_bad):
    generator = torch.Generator().manual_seed(4)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(3)]
    states = []
    for parameter in parameters:
        parameter.grad = torch.randn(shape, generator=generator)
        states.append({"momentum_buffer": torch.randn(shape, generator=generator)})
    if is_bad:
        parameters[1].grad[0, 0] = float("nan")
    return parameters, states


@pytest.mark.parametrize("is_bad", [None, False, True])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momenta_are_updated_by_one_compiled_program_too(monkeypatch, dtype, nesterov, is_bad):
    """is_bad None: no step may be skipped."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    compiled = muon._compiled_momenta.__wrapped__()
    monkeypatch.setattr(muon, "_compiled_momenta", lambda: compiled)
    skip = None if is_bad is None else torch.tensor(is_bad)
    for shape, momentum in [((8, 5), 0.85), ((5, 8), 0.9), ((6, 9), 0.95)]:
        group = {"momentum": momentum, "nesterov": nesterov}
        found = {}
        for name in ("_momentum_updates", "_compiled_momentum_updates"):
            parameters, states = _momentum_case(shape, is_bad)
            optimizer = Muon(parameters, dtype)
            updates = getattr(optimizer, name)(group, parameters, states, skip).to(dtype)
            found[name] = [updates, *(state["momentum_buffer"] for state in states)]
        for ours, known in zip(found["_compiled_momentum_updates"], found["_momentum_updates"]):
            torch.testing.assert_close(ours, known)
            assert ours.isfinite().all()
        if is_bad:
            _, states = _momentum_case(shape, is_bad)
            for ours, state in zip(found["_compiled_momentum_updates"][1:], states):
                assert torch.equal(ours, state["momentum_buffer"])
    assert counter.frame_count == 1


def test_nothing_stays_nothing():
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))
    assert torch.equal(
        normalize_rows(torch.zeros(2, 4, 6), torch.zeros(2, 4, 1), 0.05)[0], torch.zeros(2, 4, 6)
    )
    half = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]])  # a row without a gradient
    torch.testing.assert_close(normalize_rows(half, torch.zeros(1, 2, 1), 0.05)[0], half)


@pytest.mark.parametrize("skip", [None, 1.0])
def test_cautious_decay_spares_weights_that_the_update_moves_away_from_zero(skip):
    plain, decayed, cautious = (parameters(3) for _ in range(3))
    lr, decay = 0.1, 0.3
    before = [parameter.detach().clone() for parameter in plain]
    for mine, options in ((plain, {}), (decayed, {"weight_decay": decay}),
                          (cautious, {"weight_decay": decay, "is_cautious": True})):  # fmt: skip
        optimizer = Muon(
            mine, dtype=torch.float32, lr=lr, **options | ({} if options else {"weight_decay": 0.0})
        )
        optimizer.found_inf = None if skip is None else torch.tensor(skip)
        moved(optimizer, mine, steps=1)
    for start, without, full, spared in zip(before, plain, decayed, cautious):
        moves_to_zero = (without.detach() - start) * start < 0
        if skip:
            assert torch.equal(spared, start)
        else:
            assert 0 < moves_to_zero.float().mean() < 1
            torch.testing.assert_close(spared[moves_to_zero], full[moves_to_zero])
            torch.testing.assert_close(spared[~moves_to_zero], without[~moves_to_zero])


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "weight_decay": 0.3}, {"weight_decay": 0.3, "is_cautious": True}],
)
def test_fused_updates_are_those_of_plain_torch(dtype, options):
    plain, fused = parameters(1), parameters(1)
    with torch.no_grad():
        for parameter in (*plain, *fused):
            parameter[0] = 0  # a row without weights
    optimizers = [
        Muon(mine, dtype, is_fused=mine is fused, lr=0.1, **options) for mine in (plain, fused)
    ]
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    )
    for a, b in zip(moved(optimizers[0], plain), moved(optimizers[1], fused)):
        torch.testing.assert_close(b, a, **tolerance)
    for a, b in zip(optimizers[0].state.values(), optimizers[1].state.values()):
        torch.testing.assert_close(b["momentum_buffer"], a["momentum_buffer"])
        torch.testing.assert_close(b["row_second_moment"], a["row_second_moment"], **tolerance)


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit_of_fused_updates(dtype):
    results, n_threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            generator = torch.Generator().manual_seed(1)
            grads, momenta, weights = (
                list(torch.randn(3, 3, 13, 700, generator=generator)[i]) for i in range(3)
            )
            means = [torch.rand(13, 1, generator=generator) for _ in range(3)]
            updates = native.muon_momentum(grads, momenta, 0.9, True, dtype)
            native.muon_update(updates, means, weights, 0.05, 0.1, 0.3, True)
            results.append([updates, *momenta, *means, *weights])
    finally:
        torch.set_num_threads(n_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
