"""From a config to its settings: every choice that depends on the machine, the ranks or the data is made here."""

import math
import shutil
import sys

import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import choose_precision, matmul_flops
from thinker.runtime.divisors import divisors
from thinker.runtime.errors import UserError
from thinker.runtime.memory import format_bytes
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training.config import Config, Settings, TrainSettings
from thinker.training.memory_estimate import estimate_memory, free_memory, largest_micro_batch, usable_fraction
from thinker.training.metrics import flops_per_token, peak_flops
from thinker.training.optimizers import resolve_learning_rates

# Seconds that compiling the blocks takes, and the share of a step that it saves by width, widest first: measured on a
# CPU in fp32 (docs/benchmarks.md), a guess on a GPU.
COMPILE_COST = {"cpu": (35.0, {384: 0.12, 256: 0.04, 0: 0.0}), "cuda": (60.0, {0: 0.3})}
SHARDED_SAVE_BYTES = 8e9  # from here on, gathering and writing the weights on one rank keeps the others waiting
EXPECTED_MFU = 0.4  # for a first guess of a step's time


def resolve_settings(
    config: Config,
    model_config: ThinkerConfig,
    device: torch.device,
    precision: str | None = None,
    previous: Settings | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> Settings:
    """Decide everything that the config leaves open, the same on all ranks. Choices go to stderr.

    `precision`: from resolve_precision(), if it was called before; `previous`: of a run that is resumed, whose choices
    are kept. Raises UserError where the batch cannot be split, or the machine cannot do what is asked for.
    """
    train = config.train
    check_batch_split(config, dist)
    if train.offload_activations and device.type != "cuda":
        reason = f"train.offload_activations moves activations off a CUDA GPU; this run is on {device.type}"
        raise UserError(f"{reason}. train.checkpoint_every_n_blocks=1 saves memory here")
    precision = precision or resolve_precision(config, device, previous, dist)
    save_sharded = train.save_sharded
    if save_sharded == "auto":
        with torch.device("meta"):
            weight_bytes = sum(parameter.nbytes for parameter in Thinker(model_config).parameters())
        save_sharded = dist.world_size > 1 and weight_bytes > SHARDED_SAVE_BYTES and not train.async_save
    choices = {"precision": precision, "save_sharded": save_sharded, "micro_batch_size": 1, "compile": False}  # for now
    lr_scale = 0.1 if config.run.init_from is not None and train.lora_rank is None else 1.0  # fine-tuning all weights
    optimizer = resolve_learning_rates(config.optimizer, model_config, train.batch_size, lr_scale)
    for name in () if train.lora_rank is None else ("embedding_lr", "head_lr", "norm_lr"):  # adapters are matrices
        if getattr(config.optimizer, name) is not None:
            raise UserError(f"optimizer.{name} is not read with train.lora_rank; set optimizer.lr instead")
        optimizer = optimizer.model_copy(update={name: None})
    resolved = {"model": model_config, "optimizer": optimizer, "train": TrainSettings(**train.model_dump() | choices)}
    settings = Settings(**dict(config) | resolved)
    settings = settings.with_train(parallel=resolve_parallel(settings, device, dist))
    micro_batch_size = resolve_micro_batch_size(config, settings, device, previous, dist)
    compile_blocks = resolve_compile(config, settings, device, previous)
    micro_batch_size, compile_blocks = dist.broadcast_object([micro_batch_size, compile_blocks])
    return settings.with_train(micro_batch_size=micro_batch_size, compile=compile_blocks)


def check_batch_split(config: Config, dist: DistContext) -> None:
    """Raise UserError where the ranks cannot share a batch evenly, in whole micro-batches."""
    batch_size, micro_batch_size = config.train.batch_size, config.train.micro_batch_size
    rows = batch_size // dist.world_size
    if batch_size % dist.world_size:
        raise UserError(
            f"train.batch_size ({batch_size}) must be a multiple of the number of ranks ({dist.world_size}); "
            f"it can be split over these numbers of ranks: {', '.join(map(str, divisors(batch_size)))}"
        )
    if isinstance(micro_batch_size, int) and rows % micro_batch_size:
        raise UserError(
            f"train.micro_batch_size ({micro_batch_size}) must divide each rank's share of train.batch_size, "
            f"{rows} sequences; possible: {', '.join(map(str, divisors(rows)))}"
        )


def resolve_precision(
    config: Config, device: torch.device, previous: Settings | None = None, dist: DistContext = SINGLE_PROCESS
) -> str:
    """fp32, bf16 or fp16. Raises UserError where the device does not support what is asked for."""
    precision = config.train.precision
    if precision == "auto" and previous is not None:
        try:
            precision = choose_precision(previous.train.precision, device)
        except UserError as error:
            raise UserError(f"the run was begun in {previous.train.precision}: {error}") from error
    if precision == "auto" and config.train.deterministic and device.type == "cpu":
        precision = "fp32"  # "auto" rests on a measurement, which differs from run to run
    return dist.broadcast_object(choose_precision(precision, device))


def resolve_parallel(settings: Settings, device: torch.device, dist: DistContext) -> str:
    """ddp or fsdp for several ranks. Raises UserError for fp16 under FSDP2."""
    parallel = settings.train.parallel
    if dist.world_size == 1:
        return parallel
    if parallel == "auto":
        fits = estimate_memory(settings, 1, device).peak <= usable_fraction(device) * free_memory(device, dist)
        parallel = dist.broadcast_object("ddp" if fits else "fsdp")
    rows = settings.train.batch_size // dist.world_size
    share = {"ddp": "the whole model", "fsdp": "a part of the model"}[parallel]
    print(f"{dist.world_size} ranks, each with {rows} sequences and {share} ({parallel})", file=sys.stderr)
    if parallel == "fsdp" and settings.train.precision == "fp16":
        raise UserError("train.parallel=fsdp goes with train.precision=bf16 or fp32")
    return parallel


def resolve_micro_batch_size(
    config: Config, settings: Settings, device: torch.device, previous: Settings | None, dist: DistContext
) -> int:
    """Sequences per forward pass. Raises UserError where not one fits into memory."""
    rows = settings.train.batch_size // dist.world_size
    if config.train.micro_batch_size != "auto":
        return config.train.micro_batch_size or rows
    if previous is not None:
        return math.gcd(previous.train.micro_batch_size, rows)  # there may be more ranks now
    free = free_memory(device, dist)
    size = largest_micro_batch(settings, device, free, dist)
    print(f"{size} sequences at once fit into {format_bytes(free)}", file=sys.stderr)
    return size


def resolve_compile(config: Config, settings: Settings, device: torch.device, previous: Settings | None) -> bool:
    """Whether the blocks are compiled. Raises UserError where a compiled run is resumed without a compiler."""
    if config.train.compile != "auto":
        return config.train.compile
    if previous is not None:
        if previous.train.compile and not has_compiler(device):
            reason = "the run was begun with compiled blocks, and there is no C++ compiler here"
            raise UserError(f"{reason}; install one, or go on with train.compile=false, though not to the same bit")
        return previous.train.compile
    if config.train.deterministic:
        return False  # "auto" rests on a measurement
    pays_off, reason = compiling_pays_off(settings, device)
    print(f"{'compiling' if pays_off else 'not compiling'} the blocks: {reason}", file=sys.stderr)
    return pays_off


def compiling_pays_off(settings: Settings, device: torch.device) -> tuple[bool, str]:
    """Whether compiled steps save more time over the planned run than compiling takes, and why."""
    if device.type not in COMPILE_COST:
        return False, f"not tried on {device.type}"
    if not has_compiler(device):
        return False, "there is no C++ compiler"
    cost, savings = COMPILE_COST[device.type]
    d_model = settings.model.d_model
    saving = next(saving for width, saving in savings.items() if d_model >= width)
    if not saving:
        return False, f"at width {d_model} it saves nothing on a {device.type}"
    planned = planned_run_seconds(settings, device)
    reason = f"it takes about {cost:.0f} s and would save about {saving * planned:.0f} of {planned:.0f}"
    return saving * planned > cost, reason


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile has what it needs: a C++ compiler for a CPU, nothing for a GPU."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++"))


def planned_run_seconds(settings: Settings, device: torch.device) -> float:
    """How long the run trains: its time limit, or a guess from its FLOPs and the device's speed."""
    train = settings.train
    seconds = math.inf if train.max_minutes is None else 60 * train.max_minutes
    if train.max_steps is None:
        return seconds
    with torch.device("meta"):
        flops = flops_per_token(Thinker(settings.model), settings.data.seq_len)
    flops_per_second = peak_flops(device, train.precision) or matmul_flops(device, train.precision)
    n_tokens = train.max_steps * train.batch_size * settings.data.seq_len
    return min(seconds, n_tokens * flops / (EXPECTED_MFU * flops_per_second))
