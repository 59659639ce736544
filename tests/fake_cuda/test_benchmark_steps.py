"""What the GPU campaign measures: the steps of the baselines wait for nothing, too."""

import fake_cuda
import pytest
import torch
from device_trace import DeviceTrace

from thinker.benchmarks.environment import measure_bandwidth
from thinker.benchmarks.gpu import gpu_memory
from thinker.benchmarks.speed.attention import AttentionPass
from thinker.benchmarks.speed.train import SHAPES, make_step
from thinker.model.patterns.pattern_parser import parse_pattern

SHAPE = SHAPES["tiny"]._replace(n_micro_batches=2)


def move(module, device):
    """Module.to(), which cannot replace fake parameters; tied ones stay tied."""
    moved = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = torch.nn.Parameter(parameter.detach().to(device))
                part._parameters[name] = moved[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return module


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("thinker eager, muon", "bf16"),
        ("thinker eager, muon", "fp32"),
        ("plain eager, adamw", "bf16"),
        ("transformers eager, adamw", "bf16"),
    ],
)
def test_a_step_waits_for_nothing_and_copies_only_its_batch(gpu, monkeypatch, name, precision):
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: tensor
    )  # the fake device has no host memory
    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(
        fake_cuda, "_allows_cudnn", lambda: False
    )  # which transformers does with a mask
    step = make_step(name, SHAPE, gpu, precision)
    step()
    with DeviceTrace() as trace:
        loss = step()
    assert loss.device == gpu
    assert trace.reads == {}
    assert sum(trace.uploads.values()) == 2 * SHAPE.n_micro_batches


class Event:
    """An event of a device on which 22 copies take 40 ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 40.0


def test_bandwidth_counts_bytes_read_and_written_by_copies_of_4_gib(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with DeviceTrace() as trace:
        assert measure_bandwidth(gpu) == pytest.approx(2 * 2**32 / 0.002)
    assert trace.reads == {}
    assert trace.launches["aten.copy_"] == 22  # two to warm up


def test_memory_of_attention_is_the_allocators(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with DeviceTrace():  # answers what the mask is counted with
        one_pass = AttentionPass(parse_pattern("full"), "sdpa", (1, 4, 64, 16), gpu, torch.bfloat16)
    assert one_pass.facts["memory_bytes"] == 4000


@pytest.mark.parametrize("case", gpu_memory.CASES, ids=lambda case: case.name)
def test_memory_is_limited_before_the_micro_batch_is_chosen(gpu, monkeypatch, case):
    def limit(fraction):
        monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: fraction)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    if case.limit_gb is not None:
        case = case._replace(limit_gb=0.098)  # too little for all 8 sequences
    calls = gpu_memory.make_steps(case, torch.device("cuda"), is_toy=True)
    assert calls.calls["step"]().device == gpu
    if case.limit_gb is None:
        assert calls.facts.keys() == {"micro_batch_size", "predicted_bytes"}
    else:
        assert calls.facts["limit_bytes"] == 98_000_000
        assert calls.facts["micro_batch_size"] < 8
        assert calls.facts["predicted_bytes"] < 0.95 * 98_000_000
