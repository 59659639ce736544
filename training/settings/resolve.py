"""Resolve a config to settings: make every choice that depends on the machine, the ranks or the
data."""

import math

import torch

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.checks import divisors
from thinker.runtime.device import choose_precision
from thinker.runtime.errors import UserError
from thinker.runtime.memory import free_memory
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.runtime.registry import offers
from thinker.training.config.config import Config
from thinker.training.config.sections import OptimizerConfig, TrainConfig
from thinker.training.optim.optimizers import resolve_learning_rates
from thinker.training.settings.settings import Settings, TrainSettings

# Beyond this, the other ranks wait too long while one rank gathers and writes the weights.
SHARDED_SAVE_BYTES = 8e9
# What the saves of one step copy at most, in units of the weights: those of the best checkpoint and
# of the newest one, two moments, and an average.
COPIED_WEIGHTS = 5


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
    choices = {
        "precision": precision,
        "save_sharded": _saves_sharded(train, model_config, dist),
        "async_save": _saves_in_background(train, model_config, device, previous, dist),
        "micro_batch_size": 1,  # for now, like the next one
        "compile": False,
    }
    resolved = {
        "model": model_config,
        "optimizer": _resolve_optimizer(config, model_config, previous),
        "train": TrainSettings(**train.model_dump() | choices),
    }
    settings = Settings(**dict(config) | resolved)
    if dist.world_size > 1:
        from thinker.training.settings.memory_choices import resolve_parallel

        settings = settings.with_train(parallel=resolve_parallel(settings, device, dist))
    # What fits depends on whether the blocks are compiled, which "auto" decides by a plain step.
    settings = settings.with_train(compile=config.train.compile is True)
    micro_batch_size = _resolve_micro_batch_size(config, settings, device, previous, dist)
    settings = settings.with_train(micro_batch_size=dist.broadcast_object(micro_batch_size))
    compile_blocks = dist.broadcast_object(
        _resolve_compile(config, settings, device, previous, dist)
    )
    if compile_blocks == settings.train.compile:
        return settings
    settings = settings.with_train(compile=compile_blocks)
    micro_batch_size = _resolve_micro_batch_size(config, settings, device, previous, dist)
    return settings.with_train(micro_batch_size=dist.broadcast_object(micro_batch_size))


def _saves_sharded(train: TrainConfig, model_config: ThinkerConfig, dist: DistContext) -> bool:
    """Whether each rank writes its own part of a checkpoint."""
    if train.save_sharded != "auto":
        return train.save_sharded
    if dist.world_size == 1 or train.async_save is True:
        return False
    return _weight_bytes(model_config) > SHARDED_SAVE_BYTES


def _saves_in_background(
    train: TrainConfig,
    model_config: ThinkerConfig,
    device: torch.device,
    previous: Settings | None,
    dist: DistContext,
) -> bool:
    """Whether a thread writes checkpoints. On a CPU it would compete with the steps for cores."""
    if train.async_save != "auto":
        return train.async_save
    if dist.world_size > 1 or device.type != "cuda":
        return False
    if previous is not None:
        return previous.train.async_save
    return COPIED_WEIGHTS * _weight_bytes(model_config) < free_memory(torch.device("cpu"))


def _weight_bytes(model_config: ThinkerConfig) -> int:
    with torch.device("meta"):
        model = Thinker(model_config)
    return sum(parameter.nbytes for parameter in model.parameters())


def _resolve_optimizer(
    config: Config, model_config: ThinkerConfig, previous: Settings | None
) -> OptimizerConfig:
    """The section `optimizer` with all its learning rates."""
    train = config.train
    has_adapters = train.lora_rank is not None
    lr_scale = 1.0
    if config.run.init_from is not None and not has_adapters:
        lr_scale = 0.1  # fine-tuning of all weights
    optimizer = resolve_learning_rates(config.optimizer, model_config, train.batch_size, lr_scale)
    given = config.optimizer
    is_open = given.momentum is None and given.momentum_warmup_steps is None
    if previous is not None and is_open and optimizer.name == "muon":
        # Runs of earlier versions do not have this key; their momentum is constant.
        warmup_steps = previous.optimizer.momentum_warmup_steps or 0
        optimizer = optimizer.model_copy(update={"momentum_warmup_steps": warmup_steps})
    if not has_adapters:
        return optimizer
    for name in ("embedding_lr", "head_lr", "norm_lr"):  # adapters are matrices
        if getattr(config.optimizer, name) is not None:
            raise UserError(
                f"optimizer.{name} has no effect with train.lora_rank; set optimizer.lr instead"
            )
        optimizer = optimizer.model_copy(update={name: None})
    return optimizer


def _resolve_micro_batch_size(
    config: Config,
    settings: Settings,
    device: torch.device,
    previous: Settings | None,
    dist: DistContext,
) -> int:
    """The number of sequences per forward pass. Raises UserError if not even one fits in memory."""
    rows = settings.train.batch_size // dist.world_size
    if config.train.micro_batch_size != "auto":
        return config.train.micro_batch_size or rows
    if previous is not None:
        return math.gcd(previous.train.micro_batch_size, rows)  # there may be more ranks now
    from thinker.training.settings.memory_choices import choose_micro_batch_size

    return choose_micro_batch_size(settings, device, dist)


def _resolve_compile(
    config: Config,
    settings: Settings,
    device: torch.device,
    previous: Settings | None,
    dist: DistContext,
) -> bool:
    """Whether to compile the blocks. Raises UserError if that is asked for on an old GPU, or if a
    compiled run is resumed without a compiler."""
    wanted = config.train.compile
    if wanted is False:
        return False
    if wanted == "auto" and previous is None and config.train.deterministic:
        return False  # "auto" depends on a measurement
    from thinker.training.settings import compile_choice

    if wanted is True:
        compile_choice.check_capability(device)
        return True

    if previous is None:
        return compile_choice.choose_compile(settings, device, dist)
    if previous.train.compile:
        compile_choice.check_compiler(device)
    return previous.train.compile


def check_batch_split(config: Config, dist: DistContext) -> None:
    """Raise UserError unless the ranks can share a batch evenly, in whole micro-batches."""
    batch_size = config.train.batch_size
    micro_batch_size = config.train.micro_batch_size
    rows = batch_size // dist.world_size
    if batch_size % dist.world_size:
        possible = ", ".join(map(str, divisors(batch_size)))
        raise UserError(
            f"train.batch_size ({batch_size}) is not a multiple of the number of ranks "
            f"({dist.world_size}); change it, or use one of these numbers of ranks: {possible}"
        )
    if isinstance(micro_batch_size, int) and rows % micro_batch_size:
        possible = ", ".join(map(str, divisors(rows)))
        raise UserError(
            f"train.micro_batch_size ({micro_batch_size}) does not divide each rank's share of "
            f"train.batch_size ({rows} sequences); use {possible}"
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
