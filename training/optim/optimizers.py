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
from thinker.training.optim.muon import Muon
from thinker.training.optim.registry import OPTIMIZERS

# Parameters of modules that are no matrices of blocks, by the start of their names.
KINDS = {"embedding": "embedding", "positions": "embedding", "lm_head": "head"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
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


def muon_and_adamw(parts: OptimizerParts) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and the head, AdamW for the embedding and the norms.

    Muon moves each matrix by its orthogonalized momentum, which has the same size in every
    direction. It also trains the head, often left to AdamW (Loshchilov & Hutter 2019,
    arXiv:1711.05101), as it separates rare words with similar neighbors better
    (docs/experiments.md).
    """
    model, config = parts.model, parts.config
    rest = dict(parts.groups)
    matrices = [rest.pop(kind) for kind in ("matrices", "head") if kind in rest]
    muon = Muon(
        matrices,
        dtype=torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32,
        is_compiled=model.is_compiled and model.device.type == "cuda",
        is_cautious=config.cautious_weight_decay,
        is_fused=parts.is_fused and model.embedding.weight.dtype == torch.float32,
        momentum=config.momentum,
    )
    return [muon, _adamw(rest, parts)]


def adamw(parts: OptimizerParts) -> list[torch.optim.Optimizer]:
    """AdamW for everything."""
    return [_adamw(parts.groups, parts)]


def _adamw(groups: Mapping[str, ParameterGroup], parts: OptimizerParts) -> torch.optim.Optimizer:
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
    """Fill in the learning rates that the config leaves null (docs/explanations/learning-rates.md
    has the rules).

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
        defaults["momentum"] = 0.95
    else:
        lr = optimizer_config.lr or 1.0 / model_config.d_model * scale
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

    def set_lr(self, multiplier: float) -> None:
        """Set every group's learning rate to `multiplier` times its peak."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * multiplier

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
        return all(
            isinstance(optimizer, Muon) or getattr(optimizer, "_step_supports_amp_scaling", False)
            for optimizer in self.optimizers
        )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The complete state, named "optimizer.PARAMETER.KEY"."""
        tensors = {}
        for optimizer, name, parameter in self._named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensor = torch.as_tensor(value)
                if tensor.dtype not in DTYPES:
                    raise UserError(
                        f"{type(optimizer).__name__} keeps {key} as {tensor.dtype}, which "
                        f"checkpoints "
                        "do not store; use a tensor in float32"
                    )
                tensors[f"optimizer.{name}.{key}"] = tensor
        return tensors

    def expected_state(self, saved: Mapping[str, tuple] | None = None) -> dict[str, Tensor]:
        """Tensors with the shapes of tensors() after the first step: on the meta device, or sharded
        zeros.

        saved: name -> (dtype, *shape) of the tensors in a checkpoint, which say what other
        optimizers than ours keep.
        """
        expected = {}
        for optimizer, name, parameter in self._named_parameters():
            prefix = f"optimizer.{name}."
            like = parameter.detach()
            like = torch.zeros_like(like) if hasattr(like, "to_local") else like.to("meta")
            if isinstance(optimizer, Muon):
                state = {
                    "momentum_buffer": like,
                    "row_second_moment": torch.zeros_like(like[:, :1]),
                }
            elif type(optimizer) is torch.optim.AdamW:
                step = torch.empty((), device="meta")
                state = {"step": step, "exp_avg": like, "exp_avg_sq": torch.zeros_like(like)}
            else:
                state = _saved_state(prefix, like, saved or {})
            for key, value in state.items():
                expected[prefix + key] = value
        return expected

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of tensors() from any device."""
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                for name, index in zip(group["param_names"], group["params"]):
                    prefix = f"optimizer.{name}."
                    own = {}
                    for key, value in tensors.items():
                        if key.startswith(prefix):
                            own[key.removeprefix(prefix)] = value
                    state["state"][index] = own
            optimizer.load_state_dict(state)

    def _named_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"]):
                    yield optimizer, name, parameter


def _saved_state(prefix: str, like: Tensor, saved: Mapping[str, tuple]) -> dict[str, Tensor]:
    """What a checkpoint has for a parameter. Tensors of its shape are sharded as it is."""
    state = {}
    for name, (dtype, *shape) in saved.items():
        if not name.startswith(prefix):
            continue
        if tuple(shape) == tuple(like.shape) and TORCH_DTYPES[dtype] == like.dtype:
            tensor = torch.zeros_like(like)
        else:
            tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
        state[name.removeprefix(prefix)] = tensor
    return state


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
