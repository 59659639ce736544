"""The choices that depend on the machine: which device, and which precision it is fastest in."""

from __future__ import annotations

import time

import torch

from errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one. Raises UserError where it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, available in there.items() if available)
    if not there.get(name, False):
        names = ", ".join(kind for kind, available in there.items() if available)
        raise UserError(f"the device {name} is not there; this machine has: {names}")
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> str:
    """The precision to train in; "auto" measures on a CPU and takes bf16 on a GPU that has it.

    Raises UserError where the device cannot do it.
    """
    if name == "fp16" and device.type == "cpu":
        raise UserError("precision fp16 trains on a GPU only; on the CPU use bf16 or fp32")
    if device.type == "cuda" and name in ("auto", "bf16"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        if name == "bf16":
            raise UserError("this GPU has no bf16; use fp16 or fp32")
        return "fp16"
    if name != "auto":
        return name
    if device.type == "cpu":
        return "bf16" if _matmul_seconds(torch.bfloat16) < 0.8 * _matmul_seconds(torch.float32) else "fp32"
    return "fp32"


def choose_decoding_precision(name: str, device: torch.device) -> str:
    """The precision to sample in; "auto" takes bf16 on a GPU that has it, and fp32 on a CPU.

    On CPUs, with and without AMX, bf16 was hardly faster for one row (docs/decoding.md), and its logits have exact ties
    at the top in some rows. So that a seed means one text, this does not depend on a measurement.

    Raises UserError where the device cannot do it.
    """
    if device.type == "cpu":
        return "fp32" if name == "auto" else name
    return choose_precision(name, device)


def _matmul_seconds(dtype: torch.dtype, size: int = 768, repeats: int = 5) -> float:
    """The best of a few products of two square matrices on the CPU."""
    a = torch.ones(size, size, dtype=dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times)
