"""Which optimizer moves which parameter, and how fast."""

from __future__ import annotations

import torch
from torch import Tensor

from thinker.model import Thinker, ThinkerConfig
from thinker.training.config import Config, OptimizerSection
from thinker.training.muon import Muon


def resolve_learning_rates(
    section: OptimizerSection, config: ThinkerConfig, batch_size: int, scale: float = 1.0
) -> OptimizerSection:
    """The section with every rate that it leaves out, by rules that hold across widths and batches (docs/training.md).

    Under Muon a matrix moves by its rate in every direction, whatever its size, so neither lr nor head_lr depends on
    the width. An embedding's row is read alone: its entries, of order one, move by embedding_lr. AdamW moves every
    entry by its rate, and in a matrix d_model entries that move at once are summed: its lr falls as 1/d_model (Yang et
    al. 2022, arXiv:2203.03466), and so does that of an embedding which is tied to the head.

    Below 16 sequences a step the gradient is mostly noise, and every rate falls with the root of their number (Malladi
    et al. 2022, arXiv:2205.10287). Above, the rates stay. `scale`: multiplies all of them, see finetune_lr_scale().
    """
    noise = scale * min(1.0, batch_size / 16) ** 0.5
    if section.name == "muon":
        embedding_lr = (2.0 / config.d_model if config.tie_embeddings else 0.3) * noise
        rule = {"lr": 0.04 * noise, "embedding_lr": embedding_lr, "head_lr": 0.05 * noise, "norm_lr": 0.01 * noise}
        rule["momentum"] = 0.95
    else:
        lr = section.lr or 1.0 / config.d_model * noise
        rule = {"lr": lr, "embedding_lr": lr, "head_lr": lr, "norm_lr": lr}
    if config.tie_embeddings:
        del rule["head_lr"]  # there is no head of its own
    return section.model_copy(update={name: rate for name, rate in rule.items() if getattr(section, name) is None})


def finetune_lr_scale(config: Config) -> float:
    """How fast weights that are good already move, beside those that are drawn anew: all of them, a tenth as fast.

    Adapters begin at zero and have their whole way before them.
    """
    return 0.1 if config.run.init_from is not None and config.train.lora_rank is None else 1.0


class Optimizers:
    """One or two torch optimizers as one: AdamW alone, or Muon on the matrices and AdamW on embedding and norm weights.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves each matrix by its orthogonalised
    momentum: every direction of it by the same amount. That suits the head too, although it is often left to AdamW
    (Loshchilov & Hutter 2019, arXiv:1711.05101): rare words with like neighbours keep apart (docs/experiments.md).
    """

    def __init__(self, model: Thinker, section: OptimizerSection) -> None:
        """`section`: with every rate filled in."""
        muon = section.name == "muon"
        names: dict[str, list[str]] = {"matrices": [], "embedding": [], "head": [], "norms": []}
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in parameters.items():
            kind = {"embedding": "embedding", "positions": "embedding", "lm_head": "head"}.get(
                name.split(".")[0], "matrices"
            )
            names["norms" if parameter.dim() == 1 else kind].append(name)
        decay = {"matrices": section.weight_decay, "embedding": 0.0, "head": section.weight_decay, "norms": 0.0}
        rates = {
            "matrices": section.lr, "embedding": section.embedding_lr, "head": section.head_lr, "norms": section.norm_lr
        }  # fmt: skip
        groups = {
            kind: {
                "params": [(name, parameters[name]) for name in found],
                "lr": rates[kind],
                "weight_decay": decay[kind],
            }
            for kind, found in names.items()
            if found
        }
        self.optimizers: list[torch.optim.Optimizer] = []
        if muon:
            self.optimizers.append(
                Muon(
                    [groups.pop(kind) for kind in ("matrices", "head") if kind in groups],
                    dtype=torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32,
                    momentum=section.momentum,
                )
            )
        fused = model.device.type in ("cpu", "cuda")
        self.optimizers.append(
            torch.optim.AdamW(list(groups.values()), betas=section.betas, eps=section.eps, fused=fused)
        )
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.lr = section.lr

    def set_lr(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self.peaks):
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * factor

    def step(self, skip: Tensor | None = None) -> None:
        """One update of everything, or, where `skip` (a scalar on the device) is true, of nothing at all.

        A GPU is not waited for: its kernels read `skip` themselves.
        """
        if skip is not None and skip.device.type != "cuda":
            if bool(skip):
                return
            skip = None
        for optimizer in self.optimizers:
            optimizer.found_inf = None if skip is None else skip.float()
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state, as "optimizer.PARAMETER.KEY"."""
        found = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"]):
                    for key, value in optimizer.state[parameter].items():
                        found[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return found

    def expected(self) -> dict[str, Tensor]:
        """Tensors of the shapes that tensors() has after a first step, without contents; zeros where ranks share."""
        found = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"]):
                    like = parameter.detach()
                    like = torch.zeros_like(like) if hasattr(like, "to_local") else like.to("meta")
                    if isinstance(optimizer, Muon):
                        state = {"momentum_buffer": like, "row_second_moment": torch.zeros_like(like[:, :1])}
                    else:
                        state = {"step": torch.empty((), device="meta"), "exp_avg": like}
                        state["exp_avg_sq"] = torch.zeros_like(like)
                    found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of tensors(), from any device."""
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for group in state["param_groups"]:
                for name, index in zip(group["param_names"], group["params"]):
                    prefix = f"optimizer.{name}."
                    state["state"][index] = {
                        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
                    }
            optimizer.load_state_dict(state)
