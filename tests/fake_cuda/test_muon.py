"""How many kernels a step of Muon launches for GPT-2's matrices: 12 layers, width 768, a vocabulary
of 50,304."""

import pytest
import torch
from device_trace import DeviceTrace

from thinker.training.optim import muon
from thinker.training.optim.muon import Muon, normalize_rows

SHAPES = [(768, 768)] * 48 + [(2048, 768)] * 24 + [(768, 2048)] * 12
N_SHAPES = 4  # with the head's
KERNELS = (
    4  # of the compiled function: a sum over columns, one over rows in two stages, and the product
)


@pytest.mark.parametrize(
    ("is_compiled", "decay", "limit"),
    [(True, 0.0, 130), (True, 0.1, 150), (False, 0.0, 185), (False, 0.1, 200)],
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
    optimizer.step()  # creates the state
    with trace, trace.part():
        optimizer.step()
    assert trace.reads == trace.uploads == {}
    assert trace.launches["normalize_rows"] == (N_SHAPES if is_compiled else 0)
    n_launches = trace.launches.total() + (KERNELS - 1) * trace.launches["normalize_rows"]
    assert n_launches <= limit
