"""Optimizers: default learning rates, parameter groups, and one interface for all that a model is
trained with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint.format import DTYPES
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.registry import import_offer
from thinker.training.config.sections import OptimizerConfig
from thinker.training.optim.registry import OPTIMIZERS
from thinker.training.optim.schedule import momentum_at

# Parameters that are no matrices of blocks, by the first part of their names.
KINDS = {
    "embedding": "embedding",
    "positions": "embedding",
    "value_embeddings": "embedding",
    "bigram_embedding": "embedding",
    "lm_head": "head",
    "relative_bias": "norms",  # a number per head and distance
}
ParameterGroup = dict[str, Any]  # as torch's optimizers take it


@dataclass(frozen=True)
class OptimizerParts:
    """What an optimizer is made from."""

    model: Thinker
    groups: Mapping[str, ParameterGroup]
    """Named parameters with `lr` and `weight_decay`, by kind: matrices, embedding, head, norms."""
    config: OptimizerConfig
    is_fused: bool = False
    """Whether Muon may use the kernels of native/train.c."""


OptimizerFactory = Callable[[OptimizerParts], list[torch.optim.Optimizer]]


def adamw(parts: OptimizerParts) -> list[torch.optim.Optimizer]:
    """AdamW for everything."""
    return [adamw_of(parts.groups, parts)]


def adamw_of(groups: Mapping[str, ParameterGroup], parts: OptimizerParts) -> torch.optim.Optimizer:
    """AdamW for some of the groups."""
    is_fused = parts.model.device.type in ("cpu", "cuda")
    config = parts.config
    return torch.optim.AdamW(
        list(groups.values()), betas=config.betas, eps=config.eps, fused=is_fused
    )


def resolve_learning_rates(
    optimizer_config: OptimizerConfig,
    model_config: ThinkerConfig,
    batch_size: int,
    lr_scale: float = 1.0,
) -> OptimizerConfig:
    """Fill in the learning rates and the momentum that the config leaves null
    (docs/explanations/learning-rates.md has the rules).

    Muon moves a matrix of any size by its learning rate in every direction, so lr and head_lr do
    not depend on the width. AdamW moves every entry by its learning rate, and a matrix adds up
    d_model entries that move together, so its lr is proportional to 1/d_model (Yang et al. 2022,
    arXiv:2203.03466), also for an embedding tied to the head. Below 16 sequences per step the
    gradient is mostly noise, and the rates decrease with the square root of the batch size (Malladi
    et al. 2022, arXiv:2205.10287). `lr_scale` multiplies all rates. Other optimizers get the rates
    of AdamW.
    """
    scale = lr_scale * min(1.0, batch_size / 16) ** 0.5
    is_tied = model_config.tie_embeddings
    if optimizer_config.name == "muon":
        embedding_lr = 2.0 / model_config.d_model if is_tied else 0.3
        rates = {"lr": 0.04, "embedding_lr": embedding_lr, "head_lr": 0.05, "norm_lr": 0.01}
        defaults = {name: rate * scale for name, rate in rates.items()}
        has_momentum = optimizer_config.momentum is not None
        defaults["momentum"] = 0.95
        defaults["momentum_warmup_steps"] = 0 if has_momentum else 500
    else:
        lr = optimizer_config.lr
        if lr is None:
            lr = 1.0 / model_config.d_model * scale
        defaults = {"lr": lr, "embedding_lr": lr, "head_lr": lr, "norm_lr": lr}
    if is_tied:
        del defaults["head_lr"]
    missing = {}
    for name, value in defaults.items():
        if getattr(optimizer_config, name) is None:
            missing[name] = value
    return optimizer_config.model_copy(update=missing)


class Optimizers:
    """One interface for the optimizers of a model, which `optimizer_config.name` names.

    `optimizer_config` must contain every learning rate. is_fused: see Muon.
    """

    def __init__(
        self, model: Thinker, optimizer_config: OptimizerConfig, is_fused: bool = False
    ) -> None:
        factory = OPTIMIZERS.get(optimizer_config.name)
        if isinstance(factory, str):
            factory = import_offer(factory)
        groups = parameter_groups(model, optimizer_config)
        parts = OptimizerParts(model, groups, optimizer_config, is_fused)
        self.optimizers: list[torch.optim.Optimizer] = factory(parts)
        self.lr = optimizer_config.lr
        self.momentum_warmup_steps = optimizer_config.momentum_warmup_steps

    def set_lr(self, multiplier: float) -> None:
        """Set every group's learning rate to `multiplier` times its peak."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * multiplier

    def set_momentum(self, step: int) -> None:
        """Set the momentum of Muon for a step (from 0)."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                final = group.get("final_momentum")
                if final is not None:
                    group["momentum"] = momentum_at(step, final, self.momentum_warmup_steps)

    def step(self, skip: Tensor | None = None) -> None:
        """Update all parameters, unless `skip` (a scalar on the device, read by GPU kernels) is
        true."""
        if skip is not None and not self._can_skip_on(skip.device):
            if bool(skip):
                return
            skip = None
        for optimizer in self.optimizers:
            optimizer.found_inf = None if skip is None else skip.float()
            optimizer.step()

    def _can_skip_on(self, device: torch.device) -> bool:
        """Whether all optimizers read `found_inf` on the device, so that the host need not wait for
        it."""
        if device.type != "cuda":
            return False
        return all(_reads_found_inf(optimizer) for optimizer in self.optimizers)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The complete state, named "optimizer.PARAMETER.KEY"."""
        tensors = {}
        for optimizer, name, parameter in self.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensor = torch.as_tensor(value)
                if tensor.dtype not in DTYPES:
                    raise UserError(
                        f"{type(optimizer).__name__} keeps {key} as {tensor.dtype}, which "
                        f"checkpoints do not store; use a tensor in float32"
                    )
                tensors[f"optimizer.{name}.{key}"] = tensor
        return tensors

    def named_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        """Each optimizer with the names and parameters that it trains."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"]):
                    yield optimizer, name, parameter


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does nothing if its attribute `found_inf` is 1: Muon, or a fused one of torch."""
    if getattr(optimizer, "reads_found_inf", False):
        return True
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def parameter_groups(
    model: Thinker, optimizer_config: OptimizerConfig
) -> dict[str, ParameterGroup]:
    """Parameter groups by kind: matrices, embedding, head, norms. Only matrices and the head have
    weight decay."""
    config = optimizer_config
    settings = {  # kind: learning rate, weight decay
        "matrices": (config.lr, config.weight_decay),
        "embedding": (config.embedding_lr, 0.0),
        "head": (config.head_lr, config.weight_decay),
        "norms": (config.norm_lr, 0.0),
    }
    groups: dict[str, ParameterGroup] = {}
    for kind, (lr, weight_decay) in settings.items():
        groups[kind] = {"params": [], "lr": lr, "peak_lr": lr, "weight_decay": weight_decay}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = KINDS.get(name.split(".")[0], "matrices")
        if parameter.dim() == 1:
            kind = "norms"
        groups[kind]["params"].append((name, parameter))
    return {kind: group for kind, group in groups.items() if group["params"]}
