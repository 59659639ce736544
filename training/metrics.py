"""How fast the training goes, against what the device could do, and how much memory it takes."""

import contextlib
import sys
from pathlib import Path

import torch

from thinker.model import Thinker

# Dense peaks in FLOP/s for bf16 (fp16 alike) with fp32 accumulation, from the makers' data sheets, by a part of the
# name that torch reports. For other devices no MFU is reported.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12,
    "A10G": 70e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def flops_per_token(model: Thinker, seq_len: int) -> int:
    """FLOPs of a training step per token, by the convention of PaLM's appendix B (arXiv:2204.02311).

    6 per parameter, except an embedding that is only looked up, and for attention 12 · T · the width of all heads.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not model.config.tie_embeddings:
        parameters -= model.embedding.weight.numel()
    heads = sum(block.attention.n_heads for block in model.blocks)
    return 6 * parameters + 12 * heads * model.config.head_dim * seq_len


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's dense peak in FLOP/s at a precision, or None where it is not known."""
    if device.type != "cuda" or precision == "fp32":
        return None
    words = f" {torch.cuda.get_device_name(device)} ".replace("-", " ")
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part} " in words), None)


class MemoryMeter:
    """Peak memory since this was made: allocated on a GPU, elsewhere the growth of the process's resident set."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):  # Linux may allow it: the peak so far was perhaps larger
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _peak_resident_bytes()

    def peak(self) -> int:
        """Bytes; 0 on a system that does not report them (Windows)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _peak_resident_bytes() - self.before


def _peak_resident_bytes() -> int:
    if (status := Path("/proc/self/status")).exists():  # getrusage also counts what this process was forked from
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, other systems KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
