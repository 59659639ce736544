"""Optimizers: default learning rates, parameter groups, and one interface for Muon and AdamW."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from thinker.model import Thinker, ThinkerConfig
from thinker.training.config.sections import OptimizerConfig
from thinker.training.optim.muon import Muon


def resolve_learning_rates(
    optimizer_config: OptimizerConfig,
    model_config: ThinkerConfig,
    batch_size: int,
    lr_scale: float = 1.0,
) -> OptimizerConfig:
    """Fill in the learning rates that the config leaves null (docs/explanations/learning-rates.md has the rules).

    Muon moves a matrix of any size by its learning rate in every direction, so lr and head_lr do not depend on the
    width. AdamW moves every entry by its learning rate, and a matrix adds up d_model entries that move together, so its
    lr is proportional to 1/d_model (Yang et al. 2022, arXiv:2203.03466), also for an embedding tied to the head. Below
    16 sequences per step the gradient is mostly noise, and the rates decrease with the square root of the batch size
    (Malladi et al. 2022, arXiv:2205.10287). `lr_scale` multiplies all rates.
    """
    scale = lr_scale * min(1.0, batch_size / 16) ** 0.5
    if optimizer_config.name == "muon":
        embedding_lr = 2.0 / model_config.d_model if model_config.tie_embeddings else 0.3
        rates = {"lr": 0.04, "embedding_lr": embedding_lr, "head_lr": 0.05, "norm_lr": 0.01}
        defaults = {name: rate * scale for name, rate in rates.items()} | {"momentum": 0.95}
    else:
        lr = optimizer_config.lr or 1.0 / model_config.d_model * scale
        defaults = {"lr": lr, "embedding_lr": lr, "head_lr": lr, "norm_lr": lr}
    if model_config.tie_embeddings:
        del defaults["head_lr"]
    missing = {
        name: value for name, value in defaults.items() if getattr(optimizer_config, name) is None
    }
    return optimizer_config.model_copy(update=missing)


class Optimizers:
    """One interface for AdamW on everything, or Muon on the matrices and AdamW on embedding and norms.

    Muon moves each matrix by its orthogonalized momentum, which has the same size in every direction. It also trains
    the head, often left to AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), as it separates rare words with similar
    neighbors better (docs/development/experiments.md). `optimizer_config` must contain every learning rate. is_fused: see Muon.
    """

    def __init__(
        self, model: Thinker, optimizer_config: OptimizerConfig, is_fused: bool = False
    ) -> None:
        groups = _parameter_groups(model, optimizer_config)
        self.optimizers: list[torch.optim.Optimizer] = []
        if optimizer_config.name == "muon":
            matrices = [groups.pop(kind) for kind in ("matrices", "head") if kind in groups]
            dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
            is_compiled = model.is_compiled and model.device.type == "cuda"
            options = {
                "momentum": optimizer_config.momentum,
                "is_cautious": optimizer_config.cautious_weight_decay,
            }
            options["is_fused"] = is_fused and model.embedding.weight.dtype == torch.float32
            self.optimizers.append(Muon(matrices, dtype, is_compiled=is_compiled, **options))
        options = {"betas": optimizer_config.betas, "eps": optimizer_config.eps}
        fused = model.device.type in ("cpu", "cuda")
        self.optimizers.append(torch.optim.AdamW(list(groups.values()), fused=fused, **options))
        self.lr = optimizer_config.lr

    def set_lr(self, multiplier: float) -> None:
        """Set every group's learning rate to `multiplier` times its peak."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * multiplier

    def step(self, skip: Tensor | None = None) -> None:
        """Update all parameters, unless `skip` (a scalar on the device, read by GPU kernels) is true."""
        if skip is not None and skip.device.type != "cuda":
            if bool(skip):
                return
            skip = None
        for optimizer in self.optimizers:
            optimizer.found_inf = None if skip is None else skip.float()
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The complete state, named "optimizer.PARAMETER.KEY"."""
        return {
            f"optimizer.{name}.{key}": torch.as_tensor(value)
            for optimizer, name, parameter in self._named_parameters()
            for key, value in optimizer.state[parameter].items()
        }

    def expected_state(self) -> dict[str, Tensor]:
        """Tensors with the shapes of tensors() after the first step: on the meta device, or sharded zeros."""
        expected = {}
        for optimizer, name, parameter in self._named_parameters():
            like = parameter.detach()
            like = torch.zeros_like(like) if hasattr(like, "to_local") else like.to("meta")
            if isinstance(optimizer, Muon):
                state = {
                    "momentum_buffer": like,
                    "row_second_moment": torch.zeros_like(like[:, :1]),
                }
            else:
                step = torch.empty((), device="meta")
                state = {"step": step, "exp_avg": like, "exp_avg_sq": torch.zeros_like(like)}
            expected |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        return expected

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of tensors() from any device."""
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                for name, index in zip(group["param_names"], group["params"]):
                    prefix = f"optimizer.{name}."
                    state["state"][index] = {
                        key.removeprefix(prefix): value
                        for key, value in tensors.items()
                        if key.startswith(prefix)
                    }
            optimizer.load_state_dict(state)

    def _named_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"]):
                    yield optimizer, name, parameter


def _parameter_groups(
    model: Thinker, optimizer_config: OptimizerConfig
) -> dict[str, dict[str, Any]]:
    """Parameter groups by kind: matrices, embedding, head, norms. Only matrices and the head have weight decay."""
    c = optimizer_config
    rates = {"matrices": c.lr, "embedding": c.embedding_lr, "head": c.head_lr, "norms": c.norm_lr}
    decays = {"matrices": c.weight_decay, "embedding": 0.0, "head": c.weight_decay, "norms": 0.0}
    groups: dict[str, dict[str, Any]] = {
        kind: {"params": [], "lr": lr, "peak_lr": lr, "weight_decay": decays[kind]}
        for kind, lr in rates.items()
    }
    kinds = {"embedding": "embedding", "positions": "embedding", "lm_head": "head"}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "norms" if parameter.dim() == 1 else kinds.get(name.split(".")[0], "matrices")
            groups[kind]["params"].append((name, parameter))
    return {kind: group for kind, group in groups.items() if group["params"]}
