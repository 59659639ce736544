"""Resolve a config to settings: make every choice that depends on the machine, the ranks or the
data."""

import json
import math
import shutil
import sys

import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.checks import divisors
from thinker.runtime.device import choose_precision, matmul_flops
from thinker.runtime.errors import UserError
from thinker.runtime.memory import format_bytes
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.runtime.registry import offers
from thinker.training.config.config import Config, config_sections
from thinker.training.metrics import flops_per_token, peak_flops
from thinker.training.optim.optimizers import resolve_learning_rates
from thinker.training.settings.memory_estimate import (
    estimate_memory,
    free_memory,
    largest_micro_batch,
    usable_fraction,
)
from thinker.training.settings.settings import Settings, TrainSettings

# Seconds to compile the blocks, and the share of a step that it saves by width, widest first.
# Measured on a CPU in fp32 (docs/benchmarks/training.md); a guess on a GPU.
COMPILE_COST = {"cpu": (35.0, {384: 0.12, 256: 0.04, 0: 0.0}), "cuda": (60.0, {0: 0.3})}
SHARDED_SAVE_BYTES = (
    8e9  # beyond this, the other ranks wait too long while one rank gathers and writes the weights
)
EXPECTED_MFU = 0.4  # for a first estimate of the time per step


def resolve_open_keys(
    config: Config,
    device: torch.device,
    precision: str,
    previous: Settings | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> Config:
    """Let features fill in the keys that depend on the text and the machine
    (Feature.resolve_config).

    All ranks must call it. A resumed run (with the settings `previous`) keeps what was chosen.
    """
    for resolve in offers("resolve_config"):
        config = resolve(config, device, precision, previous, dist)
    return config


def changed_overrides(before: Config, after: Config) -> list[str]:
    """The keys that resolve_open_keys() has changed, as overrides section.key=value."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    overrides = []
    for section in config_sections():
        for key, value in new[section].items():
            if value != old[section][key]:
                overrides.append(f"{section}.{key}={json.dumps(value)}")
    return overrides


def resolve_settings(
    config: Config,
    model_config: ThinkerConfig,
    device: torch.device,
    precision: str | None = None,
    previous: Settings | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> Settings:
    """Decide everything that the config leaves open, identically on all ranks. Prints choices to
    stderr.

    `precision`: the result of resolve_precision(), if already called; `previous`: settings of the
    resumed run, whose choices are kept. Raises UserError if the batch cannot be split or the
    machine lacks a feature.
    """
    train = config.train
    check_batch_split(config, dist)
    if train.offload_activations and device.type != "cuda":
        remedy = "set train.checkpoint_every_n_blocks=1 to save memory"
        raise UserError(
            f"train.offload_activations needs a CUDA GPU, but this run uses {device.type}; {remedy}"
        )
    precision = precision or resolve_precision(config, device, previous, dist)
    save_sharded = train.save_sharded
    if save_sharded == "auto":
        with torch.device("meta"):
            weight_bytes = sum(parameter.nbytes for parameter in Thinker(model_config).parameters())
        save_sharded = (
            dist.world_size > 1 and weight_bytes > SHARDED_SAVE_BYTES and not train.async_save
        )
    choices = {
        "precision": precision,
        "save_sharded": save_sharded,
        "micro_batch_size": 1,
        "compile": False,
    }  # for now
    lr_scale = (
        0.1 if config.run.init_from is not None and train.lora_rank is None else 1.0
    )  # fine-tuning all weights
    optimizer = resolve_learning_rates(config.optimizer, model_config, train.batch_size, lr_scale)
    for name in (
        () if train.lora_rank is None else ("embedding_lr", "head_lr", "norm_lr")
    ):  # adapters are matrices
        if getattr(config.optimizer, name) is not None:
            raise UserError(
                f"optimizer.{name} has no effect with train.lora_rank; set optimizer.lr instead"
            )
        optimizer = optimizer.model_copy(update={name: None})
    resolved = {
        "model": model_config,
        "optimizer": optimizer,
        "train": TrainSettings(**train.model_dump() | choices),
    }
    settings = Settings(**dict(config) | resolved)
    settings = settings.with_train(parallel=resolve_parallel(settings, device, dist))
    micro_batch_size = resolve_micro_batch_size(config, settings, device, previous, dist)
    compile_blocks = resolve_compile(config, settings, device, previous)
    micro_batch_size, compile_blocks = dist.broadcast_object([micro_batch_size, compile_blocks])
    return settings.with_train(micro_batch_size=micro_batch_size, compile=compile_blocks)


def check_batch_split(config: Config, dist: DistContext) -> None:
    """Raise UserError unless the ranks can share a batch evenly, in whole micro-batches."""
    batch_size, micro_batch_size = config.train.batch_size, config.train.micro_batch_size
    rows = batch_size // dist.world_size
    if batch_size % dist.world_size:
        raise UserError(
            f"train.batch_size ({batch_size}) is not a multiple of the number of ranks "
            f"({dist.world_size}); "
            f"change it, or use one of these numbers of ranks: "
            f"{', '.join(map(str, divisors(batch_size)))}"
        )
    if isinstance(micro_batch_size, int) and rows % micro_batch_size:
        raise UserError(
            f"train.micro_batch_size ({micro_batch_size}) does not divide each rank's share "
            f"of train.batch_size "
            f"({rows} sequences); use {', '.join(map(str, divisors(rows)))}"
        )


def resolve_precision(
    config: Config,
    device: torch.device,
    previous: Settings | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> str:
    """Choose fp32, bf16 or fp16. Raises UserError if the device does not support it."""
    precision = config.train.precision
    if precision == "auto" and previous is not None:
        try:
            precision = choose_precision(previous.train.precision, device)
        except UserError as error:
            raise UserError(
                f"the run uses train.precision={previous.train.precision}, but {error}"
            ) from error
    if precision == "auto" and config.train.deterministic and device.type == "cpu":
        precision = "fp32"  # "auto" depends on a measurement, which varies
    return dist.broadcast_object(choose_precision(precision, device))


def resolve_parallel(settings: Settings, device: torch.device, dist: DistContext) -> str:
    """Choose ddp or fsdp for several ranks. Raises UserError for fp16 with FSDP2."""
    parallel = settings.train.parallel
    if dist.world_size == 1:
        return parallel
    if parallel == "auto":
        fits = estimate_memory(settings, 1, device).peak <= usable_fraction(device) * free_memory(
            device, dist
        )
        parallel = dist.broadcast_object("ddp" if fits else "fsdp")
    rows = settings.train.batch_size // dist.world_size
    share = {"ddp": "the whole model", "fsdp": "part of the model"}[parallel]
    print(
        f"{dist.world_size} ranks, each with {rows} sequences and {share} ({parallel})",
        file=sys.stderr,
    )
    if parallel == "fsdp" and settings.train.precision == "fp16":
        raise UserError(
            "train.parallel=fsdp cannot be combined with train.precision=fp16; use bf16 or fp32"
        )
    return parallel


def resolve_micro_batch_size(
    config: Config,
    settings: Settings,
    device: torch.device,
    previous: Settings | None,
    dist: DistContext,
) -> int:
    """Choose the number of sequences per forward pass. Raises UserError if not even one fits in
    memory."""
    rows = settings.train.batch_size // dist.world_size
    if config.train.micro_batch_size != "auto":
        return config.train.micro_batch_size or rows
    if previous is not None:
        return math.gcd(previous.train.micro_batch_size, rows)  # there may be more ranks now
    free = free_memory(device, dist)
    size = largest_micro_batch(settings, device, free, dist)
    print(
        f"train.micro_batch_size=auto: {size} sequences fit in {format_bytes(free)} of free memory",
        file=sys.stderr,
    )
    return size


def resolve_compile(
    config: Config, settings: Settings, device: torch.device, previous: Settings | None
) -> bool:
    """Whether to compile the blocks. Raises UserError if a compiled run is resumed without a
    compiler."""
    if config.train.compile != "auto":
        return config.train.compile
    if previous is not None:
        if previous.train.compile and not has_compiler(device):
            remedy = (
                "install one, or add train.compile=false to continue without bitwise equal results"
            )
            raise UserError(
                f"the run uses compiled blocks, but this machine has no C++ compiler; {remedy}"
            )
        return previous.train.compile
    if config.train.deterministic:
        return False  # "auto" depends on a measurement
    pays_off, reason = compiling_pays_off(settings, device)
    print(f"{'compiling' if pays_off else 'not compiling'} the blocks: {reason}", file=sys.stderr)
    return pays_off


def compiling_pays_off(settings: Settings, device: torch.device) -> tuple[bool, str]:
    """Whether compiled steps save more time over the whole run than compilation takes, and why."""
    if device.type not in COMPILE_COST:
        return False, f"not tested on {device.type}"
    if not has_compiler(device):
        return False, "no C++ compiler found"
    cost, savings = COMPILE_COST[device.type]
    d_model = settings.model.d_model
    saving = next(saving for width, saving in savings.items() if d_model >= width)
    if not saving:
        return False, f"it does not save time on {device.type} at model.d_model={d_model}"
    planned = planned_run_seconds(settings, device)
    reason = (
        f"it takes about {cost:.0f} s and saves about {saving * planned:.0f} of {planned:.0f} s"
    )
    return saving * planned > cost, reason


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile can run: it needs a C++ compiler on a CPU, nothing on a GPU."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++"))


def planned_run_seconds(settings: Settings, device: torch.device) -> float:
    """Planned training time: the time limit, or an estimate from the FLOPs and the speed of the
    device."""
    train = settings.train
    seconds = math.inf if train.max_minutes is None else 60 * train.max_minutes
    if train.max_steps is None:
        return seconds
    with torch.device("meta"):
        flops = flops_per_token(Thinker(settings.model), settings.data.seq_len)
    flops_per_second = peak_flops(device, train.precision) or matmul_flops(device, train.precision)
    n_tokens = train.max_steps * train.batch_size * settings.data.seq_len
    return min(seconds, n_tokens * flops / (EXPECTED_MFU * flops_per_second))
