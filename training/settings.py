"""Choices that depend on the machine: made once a run, kept in its config.yaml, used again when it goes on."""

from __future__ import annotations

import math
import shutil
import sys
from typing import Literal

import torch
from pydantic import BaseModel, Field

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import choose_precision, matmul_flops
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training.config import Config
from thinker.training.memory_estimate import estimate_memory, free_memory, largest_micro_batch, usable
from thinker.training.metrics import flops_per_token, peak_flops

# What compiling the blocks costs, in seconds, and the share of a step that it saves from which width on, widest first:
# measured on a CPU in fp32 (docs/training.md), a guess on a GPU.
COMPILING = {"cpu": (35.0, {384: 0.12, 256: 0.04, 0: 0.0}), "cuda": (60.0, {0: 0.3})}
SHARDED_ABOVE = 8e9  # bytes of weights: gathering and writing them in one place would keep all ranks waiting
REACHED = 0.4  # the share of the device's matrix products that a step comes to, for a first guess of its time


class MachineSettings(BaseModel):
    """What a run was begun with on its machine, whether chosen or written in its config."""

    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    micro_batch_size: int = Field(ge=1)


def resolve_precision(
    config: Config, device: torch.device, before: MachineSettings | None, dist: DistContext = SINGLE_PROCESS
) -> None:
    """`before`: of a run that goes on. Raises UserError where the device has no such precision."""
    train = config.train
    if train.precision == "auto" and before is not None:
        try:
            train.precision = choose_precision(before.precision, device)
        except UserError as error:
            raise UserError(f"the run was begun in {before.precision}: {error}") from error
    if train.precision == "auto" and train.deterministic and device.type == "cpu":
        train.precision = "fp32"  # the choice would rest on a measurement, which differs from run to run
    train.precision = dist.broadcast_object(choose_precision(train.precision, device))


def resolve_parallelism(config: Config, model_config: ThinkerConfig, device: torch.device, dist: DistContext) -> slice:
    """How several ranks share the work, and in which files they save. Returns the rows of each batch that are ours.

    Raises UserError where a batch cannot be split evenly, or what is asked for does not go with sharing.
    """
    train = config.train
    rows, rest = divmod(train.batch_size, dist.world_size)
    if rest:
        near = " or ".join(str(size) for size in (rows * dist.world_size, (rows + 1) * dist.world_size) if size)
        numbers = ", ".join(str(n) for n in range(1, train.batch_size + 1) if train.batch_size % n == 0)
        raise UserError(
            f"train.batch_size ({train.batch_size}) is split over {dist.world_size} ranks: it must be a multiple of "
            f"{dist.world_size}, such as {near}; {train.batch_size} goes with so many ranks: {numbers}"
        )
    if isinstance(train.micro_batch_size, int) and rows % train.micro_batch_size:
        divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise UserError(
            f"train.micro_batch_size ({train.micro_batch_size}) must divide what each of {dist.world_size} ranks has "
            f"of train.batch_size ({train.batch_size}), {rows} sequences; possible: {divisors}"
        )
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in Thinker(model_config).parameters())
    if train.save_sharded == "auto":
        train.save_sharded = dist.world_size > 1 and weights > SHARDED_ABOVE and not train.async_save
    if dist.world_size > 1 and train.parallel == "auto":
        peak = estimate_memory(config, model_config, 1, device).peak
        train.parallel = dist.broadcast_object("ddp" if peak <= usable(device) * free_memory(device, dist) else "fsdp")
    if dist.world_size > 1:
        has = {"ddp": "the whole model", "fsdp": "a part of the model"}[train.parallel]
        print(f"{dist.world_size} ranks, each with {rows} sequences and {has} ({train.parallel})", file=sys.stderr)
    if dist.world_size > 1 and train.parallel == "fsdp" and train.precision == "fp16":
        raise UserError("train.parallel=fsdp goes with train.precision=bf16 or fp32")
    return slice(dist.rank * rows, (dist.rank + 1) * rows)


def resolve_micro_batch(
    config: Config,
    model_config: ThinkerConfig,
    device: torch.device,
    before: MachineSettings | None,
    dist: DistContext = SINGLE_PROCESS,
) -> None:
    """How many sequences at once, and whether blocks are compiled; what was chosen is said on stderr.

    Raises UserError where not one sequence fits, activations have no other memory to go to, or a run that was begun
    compiled cannot be here.
    """
    train, rows = config.train, config.train.batch_size // dist.world_size
    if train.offload_activations and device.type != "cuda":
        raise UserError(
            f"train.offload_activations moves activations off a CUDA GPU; this run is on {device.type}. "
            "train.checkpoint_every_n_blocks=1 saves memory here"
        )
    if train.micro_batch_size == "auto":
        if before is not None:
            train.micro_batch_size = math.gcd(before.micro_batch_size, rows)  # there may be more ranks now
        else:
            free = free_memory(device, dist)
            train.micro_batch_size = largest_micro_batch(config, model_config, device, free, dist)
            print(f"{train.micro_batch_size} sequences at once fit into {free / 1e9:.1f} GB", file=sys.stderr)
    train.micro_batch_size = train.micro_batch_size or rows
    if train.compile == "auto":
        if before is not None:
            train.compile = before.compile
            if train.compile and not can_compile(device):
                raise UserError(
                    "the run was begun with compiled blocks, and there is no C++ compiler here; install one, or go on "
                    "with train.compile=false, though not to the same bit"
                )
        elif train.deterministic:
            train.compile = False  # likewise
        else:
            train.compile, reason = compiling_pays_off(config, model_config, device)
            print(f"{'compiling' if train.compile else 'not compiling'} the blocks: {reason}", file=sys.stderr)
    train.micro_batch_size, train.compile = dist.broadcast_object([train.micro_batch_size, train.compile])


def compiling_pays_off(config: Config, model_config: ThinkerConfig, device: torch.device) -> tuple[bool, str]:
    """Whether what compiled steps save over the planned run is more than compiling takes, and the sum in words."""
    if device.type not in COMPILING:
        return False, f"not tried on {device.type}"
    if not can_compile(device):
        return False, "there is no C++ compiler"
    cost, shares = COMPILING[device.type]
    share = next(share for width, share in shares.items() if model_config.d_model >= width)
    if not share:
        return False, f"at width {model_config.d_model} it saves nothing on a {device.type}"
    planned = planned_run_seconds(config, model_config, device)
    saved = share * planned
    words = f"it takes about {cost:.0f} s and would save about {saved:.0f} of {planned:.0f}"
    return saved > cost, words


def can_compile(device: torch.device) -> bool:
    """Whether a CPU's machine has the compiler that torch needs; a GPU's brings its own."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++"))


def planned_run_seconds(config: Config, model_config: ThinkerConfig, device: torch.device) -> float:
    """How long the run will train: what the config says, or a guess from its FLOPs and the device's speed."""
    train, limits = config.train, []
    if train.max_minutes is not None:
        limits.append(60 * train.max_minutes)
    if train.max_steps is not None:
        with torch.device("meta"):
            flops = flops_per_token(Thinker(model_config), config.data.seq_len)
        rate = peak_flops(device, train.precision) or matmul_flops(device, train.precision)
        limits.append(train.max_steps * train.batch_size * config.data.seq_len * flops / (REACHED * rate))
    return min(limits)
