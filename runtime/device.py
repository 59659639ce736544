"""The choices that depend on the machine: which device, and which precision it is fastest in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from pathlib import Path

import torch

from thinker.runtime.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one. Raises UserError where it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, available in there.items() if available)
    if not there.get(name, False):
        names = ", ".join(kind for kind, available in there.items() if available)
        raise UserError(f"the device {name} is not there; this machine has: {names}")
    return torch.device(name)


def configure_backend(device: torch.device) -> None:
    """Settings of the process without which training on the device is slower."""
    if device.type == "cpu":
        torch.set_flush_denormal(True)  # peaked softmaxes fill the backward pass with them; each costs 100 cycles
        if sys.platform == "linux" and not any(name.startswith(("MALLOC_", "LD_PRELOAD")) for name in os.environ):
            # glibc gives large tensors back to the system, which must clear every page anew: 17,000 to 59,000 page
            # faults a step, and up to a fourth of its time. It shall keep what it has.
            with contextlib.suppress(OSError, AttributeError):  # another C library
                mallopt = ctypes.CDLL("libc.so.6").mallopt
                mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
                mallopt(M_MMAP_MAX, 0)
    elif device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def device_name(device: torch.device) -> str:
    """Its kind and what its maker calls it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return f"{device.type}: {name}"


def processor_name() -> str:
    """What the maker calls the CPU, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def enable_determinism() -> None:
    """The same numbers every time: kernels whose sums depend on who comes first are refused. Before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


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
        return "bf16" if matmul_flops(device, "bf16") > 1.25 * matmul_flops(device, "fp32") else "fp32"
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


def matmul_flops(device: torch.device, precision: str, size: int = 768, repeats: int = 5) -> float:
    """FLOP/s of a product of two square matrices, the best of a few."""
    a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product = a @ a
        if device.type != "cpu":
            product[0, 0].item()  # the device has finished
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
