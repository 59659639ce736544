"""The precision of training on a CPU: bf16 only where it is faster."""

import pytest
import torch

from thinker.runtime import device
from thinker.runtime.device import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("speedup_of_small", "speedup_of_large", "chosen"),
    [(0.02, 5.0, "fp32"), (0.8, 1.1, "fp32"), (0.8, 1.5, "bf16"), (2.0, 5.0, "bf16")],
)
def test_auto_is_bf16_where_large_matrices_gain(
    monkeypatch, speedup_of_small, speedup_of_large, chosen
):
    measured = []

    def matmul_flops(of_device, precision, size):
        measured.append((precision, size))
        if precision == "fp32":
            return 1e9
        return 1e9 * (speedup_of_small if size < 256 else speedup_of_large)

    monkeypatch.setattr(device, "matmul_flops", matmul_flops)
    assert choose_precision("auto", CPU) == chosen
    # Emulated bf16 would take seconds.
    assert (("bf16", 768) in measured) == (speedup_of_small > 0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_that_is_asked_for_is_not_measured(monkeypatch, precision):
    monkeypatch.delattr(device, "matmul_flops")
    assert choose_precision(precision, CPU) == precision
