"""How much memory a training step takes, known without making one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from thinker.data.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training.config import Config
from thinker.training.step import TrainingStep


@dataclass(frozen=True)
class Memory:
    """Bytes on the device. The peak is not their sum: gradients grow while activations are given back."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # what one forward pass adds
    peak: int  # the most that are alive at once, in any step but the first


class LiveTensorMeter(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.now, self.peak = device, 0, 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count it until it is gone."""
        if storage not in self.known:
            self.known[storage] = True
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, size)

    def drop(self, size: int) -> None:
        """A tensor's memory was given back."""
        self.now -= size


def estimate_memory(config: Config, model_config: ThinkerConfig, micro_batch_size: int, device: torch.device) -> Memory:
    """Two training steps on tensors that have shapes and no contents, so that nothing is computed or allocated.

    The very step that training makes, uncompiled; what kernels and allocators take beside tensors is not seen.
    """
    config = config.model_copy(deep=True)
    config.train.micro_batch_size, config.train.compile = micro_batch_size, False
    if config.train.precision == "fp16":
        config.train.precision = "bf16"  # as large, and without the loss scale, which asks for values
    rows = min(config.train.batch_size, 2 * micro_batch_size)  # more micro-batches do not take more at once
    seed = torch.get_rng_state()
    with FakeTensorMode(), LiveTensorMeter(device) as alive:
        with device:
            model = Thinker(model_config)
        weights = alive.now
        step = TrainingStep(model, config, guarded=False)  # there are no values to look at
        alive.now = weights  # its counters are no part of the plan
        tokens = torch.zeros(rows, config.data.seq_len, dtype=torch.int64, device=device)
        documents = tokens if config.data.document_masking else None
        batch = Batch(tokens, tokens, tokens.numel(), documents)
        step(batch, 1.0)  # the first makes the optimizers' state
        persistent = alive.now
        part = tokens[:micro_batch_size]
        loss = step.model(part, targets=part, document_ids=None if documents is None else part)
        activations = alive.now - persistent
        del loss
        alive.peak = alive.now
        step(batch, 1.0)
    torch.set_rng_state(seed)
    return Memory(weights, weights, persistent - weights - tokens.numel() * 8, activations, alive.peak)


def usable(device: torch.device) -> float:
    """The share of free memory that tensors can have: allocators lose some between them (docs/training.md)."""
    return 0.9 if device.type == "cuda" else 0.6  # where it is malloc


def free_memory(device: torch.device, dist: DistContext = SINGLE_PROCESS) -> int:
    """Bytes that each rank could take now, all of which ask: of a host's memory the ranks on it have equal parts."""
    return int(
        min(
            free
            for (free,) in dist.all_gather_scalars(
                _free_here(device) // (1 if device.type == "cuda" else dist.local_world_size)
            )
        )
    )


def _free_here(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = 4 * 2**30  # Windows: the standard library does not say how much there is
    if hasattr(os, "sysconf"):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        free = min(free, int(limit) - int((group / "memory.current").read_text()))
    return free


def largest_micro_batch(
    config: Config, model_config: ThinkerConfig, device: torch.device, free: int, dist: DistContext = SINGLE_PROCESS
) -> int:
    """The largest divisor of a rank's share of train.batch_size whose predicted peak fits into `free` bytes.

    Raises UserError where a single sequence is too much.
    """
    batch = config.train.batch_size // dist.world_size
    elsewhere = 1 - 1 / dist.world_size if config.train.parallel == "fsdp" else 0.0  # of weights and optimizer
    for size in (n for n in range(batch, 0, -1) if batch % n == 0):
        memory = estimate_memory(config, model_config, size, device)
        peak = memory.peak - elsewhere * (memory.weights + memory.optimizer)
        if peak <= usable(device) * free:
            return size
    raise UserError(
        f"one sequence of {config.data.seq_len} tokens takes {peak / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
        "train.checkpoint_every_n_blocks=1, a shorter data.seq_len or a smaller model take less"
    )
