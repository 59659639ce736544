"""Choices that depend on the machine: the device, and the precision that is fastest on it."""

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
TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), torch.float64)}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """The device of that name; "auto" prefers a GPU. Raises UserError if this machine does not have the device."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    counts = {"cuda": n_gpus, "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    names = [kind for kind in counts if counts[kind]]
    numbered = [f"{kind}:{index}" for kind in names for index in range(counts[kind])]
    if str(name) not in ("auto", *names, *numbered):
        raise UserError(f"the device {name} is not available; this machine has: {', '.join(names)}")
    return torch.device(names[0] if name == "auto" else name)


def choose_dtype(name: torch.dtype | str) -> torch.dtype:
    """The dtype of floating-point numbers of that name, ours ("bf16") or torch's. Raises UserError for another."""
    dtype = {**DTYPES, **TORCH_DTYPES}.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"dtype is {name}; it must be {', '.join(DTYPES)} or one of torch's, such as torch.bfloat16")
    return dtype


def to_device(values: list | Tensor, device: torch.device) -> Tensor:
    """Numbers or a tensor of the host, on the device. A GPU reads pinned memory, so that the host does not wait."""
    is_cuda = device.type == "cuda"
    if isinstance(values, Tensor):
        return (values.pin_memory() if is_cuda else values).to(device, non_blocking=is_cuda)
    return torch.tensor(values, device="cpu", pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def configure_backend(device: torch.device) -> None:
    """Change settings of the process that would make training on the device slower."""
    if device.type == "cpu":
        torch.set_flush_denormal(True)  # peaked softmaxes produce many denormals, at 100 cycles each
        if sys.platform == "linux" and not any(name.startswith(("MALLOC_", "LD_PRELOAD")) for name in os.environ):
            # glibc returns large tensors to the system, which clears every page again: 17,000 to 59,000 page faults
            # per step, up to a quarter of its time. Make it keep its memory.
            with contextlib.suppress(OSError, AttributeError):  # another C library
                mallopt = ctypes.CDLL("libc.so.6").mallopt
                mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
                mallopt(M_MMAP_MAX, 0)
    elif device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def device_name(device: torch.device) -> str:
    """The type and the product name of a device."""
    return f"{device.type}: {torch.cuda.get_device_name(device) if device.type == 'cuda' else processor_name()}"


def processor_name() -> str:
    """The product name of the CPU, or its architecture if the system does not report one."""
    with contextlib.suppress(OSError):
        if found := re.search(r"(?m)^model name\s*:(.*)", Path("/proc/cpuinfo").read_text()):
            return found[1].strip()
    return platform.processor() or platform.machine()


def enable_determinism() -> None:
    """Make torch refuse nondeterministic kernels, so that runs repeat bit for bit. Call it before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def choose_precision(name: str, device: torch.device) -> str:
    """The precision to train in; "auto" measures on a CPU, and on a GPU prefers bf16. Raises UserError."""
    if name == "fp16" and device.type == "cpu":
        raise UserError("precision fp16 trains on a GPU only; on the CPU use bf16 or fp32")
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bf16" and not has_bf16:
        raise UserError("this GPU has no bf16; use fp16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if has_bf16 else "fp16"
    is_faster = device.type == "cpu" and matmul_flops(device, "bf16") > 1.25 * matmul_flops(device, "fp32")
    return "bf16" if is_faster else "fp32"


def choose_decoding_precision(name: str, device: torch.device) -> str:
    """The precision to sample in; "auto" prefers bf16 on a GPU, and is fp32 on a CPU. Raises UserError.

    It does not depend on a measurement, so that a seed always gives the same text. On CPUs, with and without AMX, bf16
    was hardly faster for one row (docs/benchmarks.md), and in some rows its largest logits are exactly equal.
    """
    if device.type == "cpu":
        return "fp32" if name == "auto" else name
    return choose_precision(name, device)


def matmul_flops(device: torch.device, precision: str, size: int = 768, repeats: int = 5) -> float:
    """FLOP/s of a product of two square matrices, the best of `repeats`."""
    a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product = a @ a
        if device.type != "cpu":
            product[0, 0].item()  # the device has finished
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
