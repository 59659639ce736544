import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.muon import Muon, orthogonalise

SHAPES = [(16, 16), (24, 16), (16, 24), (16, 16), (24, 16), (40, 8)]


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def moved(optimizer: torch.optim.Optimizer, mine: list[torch.nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        for parameter in mine:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in mine]


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.3}, {"momentum": 0.5, "ns_steps": 3}])
def test_it_moves_every_matrix_as_torchs_own_does(options):
    mine, theirs, start = parameters(1), parameters(1), parameters(1)
    ours = moved(Muon(mine, dtype=torch.bfloat16, lr=0.1, **options), mine)
    peer = moved(torch.optim.Muon(theirs, lr=0.1, adjust_lr_fn="original", **options), theirs)
    for a, b, before in zip(ours, peer, start):
        distance = (a - b).norm() / (b - before).norm()
        assert distance < 0.03  # both round to bf16 on the way, in another order


def test_its_state_is_torchs_own():
    mine, theirs = parameters(2), parameters(2)
    ours, peer = Muon(mine, dtype=torch.float32), torch.optim.Muon(theirs)
    moved(ours, mine), moved(peer, theirs)
    a, b = ours.state_dict(), peer.state_dict()
    assert a["param_groups"][0].keys() == b["param_groups"][0].keys()
    for index in b["state"]:
        assert a["state"][index].keys() == b["state"][index].keys()
        assert torch.equal(a["state"][index]["momentum_buffer"], b["state"][index]["momentum_buffer"])


def test_a_parameter_without_a_gradient_stays():
    mine = parameters(3)
    before = mine[1].detach().clone()
    optimizer = Muon(mine, dtype=torch.float32)
    mine[0].grad = torch.ones_like(mine[0])
    optimizer.step()
    assert torch.equal(mine[1], before)
    assert len(optimizer.state) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(2, 24), st.integers(2, 24), st.integers(0, 2**31))
def test_singular_values_come_near_one_and_the_directions_stay(n, rows, columns, seed):
    x = torch.randn(n, rows, columns, generator=torch.Generator().manual_seed(seed))
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalise(x, (3.4445, -4.7750, 2.0315), steps=5)
    inside = u.mT @ y @ v.mT  # (n, r, r): diagonal where the singular vectors stayed
    diagonal = inside.diagonal(dim1=1, dim2=2)
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 1e-3
    large = s > 0.05 * torch.linalg.matrix_norm(x)[:, None]  # a tiny one needs more steps to come up
    assert ((diagonal > 0.3) & (diagonal < 1.3))[large].all()
    assert (diagonal < 1.3).all()
