"""Choose and configure the device, and the fastest precision on it."""

import contextlib
import ctypes
import os
import platform
import re
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from thinker.runtime.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), torch.float64)
}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """The device of this name; "auto" prefers a GPU. Raises UserError if the device is not available."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    counts = {"cuda": n_gpus, "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    names = [kind for kind in counts if counts[kind]]
    numbered = [f"{kind}:{index}" for kind in names for index in range(counts[kind])]
    if str(name) not in ("auto", *names, *numbered):
        raise UserError(f"device {str(name)!r} is not available (available: {', '.join(names)})")
    return torch.device(names[0] if name == "auto" else name)


def choose_dtype(name: torch.dtype | str) -> torch.dtype:
    """The floating-point dtype of a short name ("bf16") or torch name. Raises UserError for other names."""
    dtype = {**DTYPES, **TORCH_DTYPES}.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UserError(
            f"unknown dtype {name}; use {', '.join(DTYPES)}, or a floating-point torch.dtype"
        )
    return dtype


def to_device(values: list | Tensor, device: torch.device) -> Tensor:
    """Copy numbers or a host tensor to the device. For a GPU uses pinned memory, so that the host does not wait."""
    is_cuda = device.type == "cuda"
    if isinstance(values, Tensor):
        return (values.pin_memory() if is_cuda else values).to(device, non_blocking=is_cuda)
    return torch.tensor(values, device="cpu", pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def configure_backend(device: torch.device) -> None:
    """Set process-wide options that make training on the device faster."""
    if device.type == "cpu":
        torch.set_flush_denormal(True)  # peaked softmaxes produce denormals, which are slow
        if sys.platform == "linux" and not any(
            name.startswith(("MALLOC_", "LD_PRELOAD")) for name in os.environ
        ):
            # Make glibc keep the memory of large tensors. Otherwise the system clears every page again: 17,000 to
            # 59,000 page faults per step, up to a quarter of its time.
            with contextlib.suppress(OSError, AttributeError):  # another C library
                mallopt = ctypes.CDLL("libc.so.6").mallopt
                mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
                mallopt(M_MMAP_MAX, 0)
    elif device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def device_name(device: torch.device) -> str:
    """Type and product name of a device."""
    return f"{device.type}: {torch.cuda.get_device_name(device) if device.type == 'cuda' else processor_name()}"


def processor_name() -> str:
    """Product name of the CPU, or its architecture if the name is unknown."""
    with contextlib.suppress(OSError):
        if found := re.search(r"(?m)^model name\s*:(.*)", Path("/proc/cpuinfo").read_text()):
            return found[1].strip()
    return platform.processor() or platform.machine()


def enable_determinism() -> None:
    """Make torch use only deterministic kernels, for bitwise equal runs. Call it before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def choose_precision(name: str, device: torch.device) -> str:
    """Choose the training precision. "auto" measures speed on a CPU and prefers bf16 on a GPU. Raises UserError."""
    if name == "fp16" and device.type == "cpu":
        raise UserError("precision fp16 cannot train on a CPU; use bf16 or fp32")
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bf16" and not has_bf16:
        raise UserError("precision bf16 is not supported by this GPU; use fp16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if has_bf16 else "fp16"
    is_faster = device.type == "cpu" and matmul_flops(device, "bf16") > 1.25 * matmul_flops(
        device, "fp32"
    )
    return "bf16" if is_faster else "fp32"


def choose_decoding_precision(name: str, device: torch.device) -> str:
    """Choose the sampling precision. "auto" prefers bf16 on a GPU and is fp32 on a CPU. Raises UserError.

    It does not depend on a measurement, so that a seed always returns the same text. On CPUs, with and without AMX,
    bf16 was hardly faster for one row (docs/benchmarks.md), and the largest logits of some rows are exactly equal.
    """
    if device.type == "cpu":
        return "fp32" if name == "auto" else name
    return choose_precision(name, device)


def matmul_flops(device: torch.device, precision: str, size: int = 768, repeats: int = 5) -> float:
    """Measure the FLOP/s of a product of two square matrices: the best of `repeats` runs."""
    a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product = a @ a
        if device.type != "cpu":
            product[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
