"""How many kernels a step of Muon launches for GPT-2's matrices: 12 layers, width 768, a vocabulary
of 50,304."""

import pytest
import torch
from device_trace import DeviceTrace

from thinker.training.optim import muon
from thinker.training.optim.muon import Muon, next_momenta, normalize_rows

SHAPES = [(768, 768)] * 48 + [(2048, 768)] * 24 + [(768, 2048)] * 12
N_SHAPES = 4  # with the head's
KERNELS = (
    4  # of the compiled function: a sum over columns, one over rows in two stages, and the product
)
LEAST_BYTES = 4 + 4 + 4 + 2  # gradient and momentum read; momentum and update in bf16 written


@pytest.mark.parametrize(
    ("is_compiled", "decay", "limit"),
    [(True, 0.0, 122), (True, 0.1, 142), (False, 0.0, 185), (False, 0.1, 200)],
)
def test_launches_of_a_step(gpu, monkeypatch, is_compiled, decay, limit):
    matrices = [torch.nn.Parameter(torch.empty(shape, device=gpu)) for shape in SHAPES]
    head = torch.nn.Parameter(torch.empty(50_304, 768, device=gpu))
    groups = [{"params": matrices, "lr": 0.04}, {"params": [head], "lr": 0.05}]
    optimizer = Muon(groups, torch.bfloat16, is_compiled=is_compiled, weight_decay=decay)
    for parameter in (*matrices, head):
        parameter.grad = torch.empty_like(parameter)
    optimizer.found_inf = torch.zeros((), device=gpu)
    trace = DeviceTrace()
    monkeypatch.setattr(muon, "_compiled", lambda: trace.fused(normalize_rows))
    monkeypatch.setattr(muon, "_compiled_momenta", lambda: trace.fused(next_momenta))
    optimizer.step()  # creates the state
    with trace, trace.part():
        optimizer.step()
    assert trace.reads == trace.uploads == {}
    assert trace.launches["normalize_rows"] == (N_SHAPES if is_compiled else 0)
    n_launches = trace.launches.total() + (KERNELS - 1) * trace.launches["normalize_rows"]
    assert n_launches <= limit


@pytest.mark.parametrize(
    ("is_compiled", "bytes_per_weight"),
    [
        # Gradients and momenta are copied into batches, and the new momenta back.
        (True, (4 + 4) + (4 + 4) + LEAST_BYTES + (4 + 4)),
        # Batches; a choice, two interpolations of two tensors each, a batch, and a cast.
        (False, (4 + 4) + (4 + 4) + 12 + 12 + 12 + (4 + 4) + (4 + 2)),
    ],
)
def test_bytes_of_the_momentum(gpu, monkeypatch, is_compiled, bytes_per_weight):
    matrices = [torch.nn.Parameter(torch.empty(768, 768, device=gpu)) for _ in range(4)]
    optimizer = Muon(matrices, torch.bfloat16, is_compiled=is_compiled)
    for parameter in matrices:
        parameter.grad = torch.empty_like(parameter)
    trace = DeviceTrace()
    monkeypatch.setattr(muon, "_compiled", lambda: trace.fused(normalize_rows))
    monkeypatch.setattr(muon, "_compiled_momenta", lambda: trace.fused(next_momenta))
    optimizer.step()  # creates the state
    skip = torch.zeros((), device=gpu, dtype=torch.bool)
    states = [optimizer.state[parameter] for parameter in matrices]
    update = optimizer._momentum_updates
    if is_compiled:
        update = optimizer._compiled_momentum_updates
    with trace, trace.part():
        updates = update(optimizer.param_groups[0], matrices, states, skip).to(torch.bfloat16)
        moved = trace.bytes_moved
    if not is_compiled:
        moved += (
            4 * updates.numel()
        )  # written in place by a _foreach function, which returns nothing
    assert moved == pytest.approx(bytes_per_weight * updates.numel(), rel=1e-3)
