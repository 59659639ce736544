"""Which optimizer moves which parameter, and how fast."""

from __future__ import annotations

import torch
from torch import Tensor

from model import Thinker
from training.muon import Muon
from training.recipe import OptimizerSection


class Optimizers:
    """One or two torch optimizers as one: AdamW alone, or Muon on the matrices of the blocks and AdamW on the rest.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves each matrix by its orthogonalised
    momentum: every direction of it by the same amount. It is made for matrices that turn activations into
    activations, so embedding, head and gains keep AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).
    """

    def __init__(self, thinker: Thinker, section: OptimizerSection) -> None:
        muon = section.name == "muon"
        lr = section.lr or (0.02 if muon else 0.002)
        head_lr = section.head_lr or (0.003 if muon else lr)
        embedding_lr = section.embedding_lr or (0.03 if muon else lr)
        if thinker.config.tie_embeddings:
            embedding_lr = section.embedding_lr or head_lr  # one matrix, and as a head it is the more sensitive
        names: dict[str, list[str]] = {"matrices": [], "embedding": [], "head": [], "gains": []}
        for name, parameter in thinker.named_parameters():
            kind = name.split(".")[0] if name.split(".")[0] in ("embedding", "head") else "matrices"
            names["gains" if parameter.dim() == 1 else kind].append(name)
        parameters = dict(thinker.named_parameters())
        decay = {"matrices": section.weight_decay, "embedding": 0.0, "head": section.weight_decay, "gains": 0.0}
        rates = {"matrices": lr, "embedding": embedding_lr, "head": head_lr, "gains": head_lr}
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
                    [groups.pop("matrices")],
                    dtype=torch.bfloat16 if thinker.dtype == torch.bfloat16 else torch.float32,
                    momentum=0.95 if section.momentum is None else section.momentum,
                )
            )
        fused = thinker.device.type in ("cpu", "cuda")
        self.optimizers.append(
            torch.optim.AdamW(list(groups.values()), betas=section.betas, eps=section.eps, fused=fused)
        )
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.lr = lr

    def set_lr(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self.peaks):
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * factor

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
