"""Choose the device, and the fastest precision on it."""

import time

import torch
from torch import Tensor

from thinker.runtime.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES_BY_NAME = DTYPES | {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """The device of this name; "auto" prefers a GPU. Raises UserError if it is not available."""
    counts = {"cuda": 0, "mps": 0, "cpu": 1}
    if torch.cuda.is_available():
        counts["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        counts["mps"] = 1
    kinds = [kind for kind, count in counts.items() if count > 0]
    if name == "auto":
        return torch.device(kinds[0])
    names = list(kinds)
    for kind in kinds:
        names += [f"{kind}:{index}" for index in range(counts[kind])]
    if str(name) not in names:
        raise UserError(f"device {str(name)!r} is not available (available: {', '.join(kinds)})")
    return torch.device(name)


def choose_dtype(name: torch.dtype | str) -> torch.dtype:
    """The floating-point dtype of a short name ("bf16") or torch name. Raises UserError."""
    dtype = DTYPES_BY_NAME.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UserError(
            f"unknown dtype {name}; use {', '.join(DTYPES)}, or a floating-point torch.dtype"
        )
    return dtype


def to_device(values: list | Tensor, device: torch.device) -> Tensor:
    """Copy numbers or a host tensor to the device."""
    is_cuda = device.type == "cuda"  # the host does not wait for a copy from pinned memory
    if not isinstance(values, Tensor):
        values = torch.tensor(values, device="cpu", pin_memory=is_cuda)
    elif is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=is_cuda)


def choose_precision(name: str, device: torch.device) -> str:
    """Choose the training precision. Raises UserError if the device does not support it.

    "auto" prefers bf16 on a GPU, and measures the speed on a CPU.
    """
    if name == "fp16" and device.type == "cpu":
        raise UserError("precision fp16 cannot train on a CPU; use bf16 or fp32")
    has_bf16 = True
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bf16" and not has_bf16:
        raise UserError("precision bf16 is not supported by this GPU; use fp16 or fp32")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if has_bf16 else "fp16"
    if device.type == "cpu" and _is_bf16_faster(device):
        return "bf16"
    return "fp32"


def _is_bf16_faster(device: torch.device) -> bool:
    """Whether large matrices multiply faster in bf16 than in fp32.

    Without instructions for bf16 a CPU emulates it, which takes seconds. Small matrices show that.
    """
    for size, least_speedup in ((192, 0.4), (768, 1.25)):
        fp32 = matmul_flops(device, "fp32", size)
        if matmul_flops(device, "bf16", size) < least_speedup * fp32:
            return False
    return True


def choose_decoding_precision(name: str, device: torch.device) -> str:
    """Choose the sampling precision. Raises UserError if the device does not support it.

    "auto" prefers bf16 on a GPU and is fp32 on a CPU. It does not depend on a measurement, so that
    a seed always returns the same text. On CPUs, with and without AMX, bf16 was hardly faster for
    one row (docs/benchmarks/decoding.md), and the largest logits of some rows are equal.
    """
    if device.type != "cpu":
        return choose_precision(name, device)
    if name == "auto":
        return "fp32"
    return name


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
