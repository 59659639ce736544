"""Choices that depend on how much memory a step needs: DDP or FSDP2, and the micro-batch size."""

import sys

import torch

from thinker.runtime.errors import UserError
from thinker.runtime.memory import format_bytes
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.settings.memory_estimate import (
    estimate_memory,
    free_memory,
    largest_micro_batch,
    usable_fraction,
)
from thinker.training.settings.settings import Settings


def resolve_parallel(settings: Settings, device: torch.device, dist: DistContext) -> str:
    """Choose ddp or fsdp for several ranks. Raises UserError for fp16 with FSDP2."""
    parallel = settings.train.parallel
    if parallel == "auto":
        peak = estimate_memory(settings, 1, device).peak
        fits = peak <= usable_fraction(device) * free_memory(device, dist)
        choice = "ddp" if fits else "fsdp"
        parallel = dist.broadcast_object(choice)
    rows = settings.train.batch_size // dist.world_size
    share = "the whole model" if parallel == "ddp" else "part of the model"
    print(
        f"{dist.world_size} ranks, each with {rows} sequences and {share} ({parallel})",
        file=sys.stderr,
    )
    if parallel == "fsdp" and settings.train.precision == "fp16":
        raise UserError(
            "train.parallel=fsdp cannot be combined with train.precision=fp16; use bf16 or fp32"
        )
    return parallel


def choose_micro_batch_size(
    settings: Settings, device: torch.device, dist: DistContext = SINGLE_PROCESS
) -> int:
    """The largest micro-batch that fits in memory. Raises UserError if not even one sequence
    fits."""
    free = free_memory(device, dist)
    size = largest_micro_batch(settings, device, free, dist)
    print(
        f"train.micro_batch_size=auto: {size} sequences fit in {format_bytes(free)} of free memory",
        file=sys.stderr,
    )
    return size
