"""Choose the device, and the fastest precision on it."""

import sys
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
# The least compute capabilities. Before, torch.cuda.is_bf16_supported() may say yes, but emulates.
BF16_CAPABILITY = (8, 0)
TRITON_CAPABILITY = (7, 0)  # of torch.compile


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

    "auto" is bf16 on a GPU that computes it, fp16 on an older one, which is printed, and measured
    on a CPU.
    """
    if name == "fp16" and device.type == "cpu":
        raise UserError("precision fp16 cannot train on a CPU; use bf16 or fp32")
    if device.type == "cuda" and not has_capability(device, BF16_CAPABILITY):
        problem = f"{describe_gpu(device)} has no bf16, which needs {_dotted(BF16_CAPABILITY)}"
        if name == "bf16":
            raise UserError(f"{problem}; use precision fp16 or fp32")
        if name == "auto":
            print(f"precision fp16: {problem}", file=sys.stderr)
            return "fp16"
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16"
    if device.type == "cpu" and _is_bf16_faster(device):
        return "bf16"
    return "fp32"


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a CUDA GPU has this compute capability. AMD's, which count differently, have all that
    is asked for here."""
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= least


def describe_gpu(device: torch.device) -> str:
    """Such as "Tesla T4 (compute capability 7.5)"."""
    capability = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {_dotted(capability)})"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


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

    "auto" is that of training on a GPU, and fp32 on a CPU. It does not depend on a measurement, so
    that a seed always returns the same text. On CPUs, with and without AMX, bf16 was hardly faster
    for one row (docs/benchmarks/decoding.md), and the largest logits of some rows are equal.
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
