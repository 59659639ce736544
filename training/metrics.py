"""Numbers for metrics.jsonl: losses, FLOPs per token, peak FLOP/s of GPUs, and peak memory."""

import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thinker.evaluation.loss import Evaluation
from thinker.model import Thinker
from thinker.training.callback import TrainingParts
from thinker.training.settings.settings import Settings

MOST_TRAINED = 0.9  # of the tokens processed; below, messages say how many had a target

# Dense peak FLOP/s in bf16 and fp16 with fp32 accumulation, from the vendors' data sheets. Keys are
# parts of the device names that torch reports. Other devices have no MFU.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def finite_or_none(value: Tensor | float) -> float | None:
    """The number, or None for nan and inf, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def part_losses(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The mean of each part of the loss that has targets. sums: of each part its sum, then its
    number of targets."""
    losses = {}
    for name, total, n_targets in zip(names, sums[::2], sums[1::2]):
        if n_targets:
            losses[name] = total / n_targets
    return losses


def evaluation_line(evaluation: Evaluation) -> dict[str, float]:
    """The losses of an evaluation, and of each source of a mixture."""
    line = {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}
    line |= evaluation.metrics
    if evaluation.entropy_floor is not None:
        line["entropy_floor"] = evaluation.entropy_floor
    return line


def speed(
    parts: TrainingParts, device: torch.device, n_processed: int, n_trained: int, seconds: float
) -> dict[str, float]:
    """Tokens and FLOPs per second of all ranks, and the share of the devices' peak if that is
    known.

    n_processed: all positions, also those of prompts and padding, which have no target and cost the
    same. n_trained: those with a target.
    """
    processed = n_processed / seconds
    flops = processed * flops_per_token(parts.model, parts.settings.data.seq_len)
    speeds = {
        "tokens_per_second": processed,
        "trained_tokens_per_second": n_trained / seconds,
        "flops_per_second": flops,
    }
    peak = peak_flops(device, parts.settings.train.precision)
    if peak:
        speeds["mfu"] = flops / (peak * parts.dist.world_size)
    return speeds


def flops_per_token(model: Thinker, seq_len: int) -> int:
    """FLOPs per processed token of a training step, counted as in appendix B of PaLM
    (arXiv:2204.02311).

    6 per parameter, excluding tables that are only read, such as an untied embedding, plus 12 · T ·
    the total width of all heads for attention. A frozen parameter has 4, as it needs no gradient: 2
    forward, and 2 back to its inputs.
    """
    looked_up = []  # tables that are read, not multiplied
    if not model.config.tie_embeddings:
        looked_up.append(model.embedding.weight)
    if model.positions is not None:
        looked_up.append(model.positions.weight)
    if model.relative_bias is not None:
        looked_up.append(model.relative_bias.weight)
    if model.value_embeddings is not None:
        looked_up += model.value_embeddings.parameters()
    if model.bigram_embedding is not None:
        looked_up += model.bigram_embedding.parameters()
    is_looked_up = set(map(id, looked_up))
    flops = 0
    for parameter in model.parameters():
        if id(parameter) in is_looked_up:
            continue
        products = 3  # the output, the gradients of its input and of the weight
        if not parameter.requires_grad:
            products = 2
        flops += 2 * products * parameter.numel()
    heads = sum(block.attention.n_heads for block in model.blocks)
    return flops + 12 * heads * model.config.head_dim * seq_len


def planned_model(settings: Settings) -> Thinker:
    """The model that settings describe, with its adapters, on the meta device."""
    with torch.device("meta"):
        model = Thinker(settings.model)
        if settings.train.lora_rank is not None:
            from thinker.model.lora import add_lora

            add_lora(model, settings.train.lora_rank)
    return model


def planned_flops_per_token(settings: Settings) -> int:
    """flops_per_token() of the model that settings describe, with its adapters."""
    return flops_per_token(planned_model(settings), settings.data.seq_len)


def format_trained(n_processed: float, n_trained: float, text: str) -> str:
    """Tokens that were trained on, put into a text, if they are clearly fewer than those
    processed; else ""."""
    if n_trained > MOST_TRAINED * n_processed:
        return ""
    return text.format(f"{n_trained:,.0f}")


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s of the device at a precision, or None if unknown."""
    if device.type != "cuda" or precision == "fp32":
        return None
    words = f" {torch.cuda.get_device_name(device)} ".replace("-", " ")
    for part, peak in PEAK_FLOPS.items():
        if f" {part} " in words:
            return peak
    return None


class MemoryMeter:
    """Peak memory since creation: allocated memory on a GPU, otherwise growth of the process's
    resident set."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):  # reset the peak, if Linux allows it
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _peak_resident_bytes()

    def peak(self) -> int:
        """Bytes; 0 on Windows, which does not report them."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _peak_resident_bytes() - self.before


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the parent process
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, other systems KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
