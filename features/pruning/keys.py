"""Keys of train.prune, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from thinker.training.config.types import ConfigSection, Fraction, Positive

if TYPE_CHECKING:
    from thinker.training.config.config import Config

Share = Annotated[float, Field(ge=0, lt=1)]
EVERY = 20  # optimizer steps


class PruneConfig(ConfigSection):
    """Pruning during training: parts become zero and stay zero (features/pruning/guide.md)."""

    weights: Share = 0.0
    """Share of the weights in each matrix of the blocks that are zero at the end."""
    neurons: Share = 0.0
    """Share of the neurons in the MLP of each layer that are zero at the end."""
    heads: Share = 0.0
    """Share of the KV heads in each layer that are zero at the end, with the query heads that share
    them."""
    by: Literal["magnitude", "activation", "gradient", "random", "gates"] = "magnitude"
    """How to choose: scores as in scripts/prune.py, or learned gates, which choose heads over all
    layers."""
    start: Fraction | None = None
    """When pruning begins, as a share of the run. null: 0.5; with gates, which must learn first,
    0.1."""
    end: Share | None = None
    """When pruning is complete, as a share of the run; what is left then trains on. null: 0.9; with
    gates 0.7."""
    every: Positive | None = None
    """Steps between scores. null: 20; with gates, every step."""

    @model_validator(mode="after")
    def _check_consistency(self) -> PruneConfig:
        if not (self.weights or self.neurons or self.heads):
            raise ValueError("weights, neurons and heads are 0, so nothing is pruned; raise one")
        start, end = self.window
        if start > end:
            raise ValueError(f"start is {start:g}, after end ({end:g}); lower it")
        if self.by == "gates" and (self.weights or self.neurons or not self.heads):
            raise ValueError(
                "by=gates chooses heads only; set heads, and remove weights and neurons"
            )
        if self.by == "gates" and self.every is not None:
            raise ValueError(
                "every has no effect with by=gates, which learn in every step; remove it"
            )
        return self

    @property
    def window(self) -> tuple[float, float]:
        """When pruning begins and when it is complete, as shares of the run."""
        start, end = (0.1, 0.7) if self.by == "gates" else (0.5, 0.9)
        return start if self.start is None else self.start, end if self.end is None else self.end

    def share(self, final: float, progress: float) -> float:
        """The share that should be pruned when the share `progress` of the run is done; `final` is
        that at the end.

        It rises fast at first and slowly at the end (Zhu & Gupta 2017, arXiv:1710.01878).
        """
        start, end = self.window
        if progress >= end:
            return final
        if progress <= start:
            return 0.0
        return final * (1 - (1 - (progress - start) / (end - start)) ** 3)


class PruneKeys(ConfigSection):
    """Keys of the section `train`."""

    prune: PruneConfig | None = None
    """Prune during training, such as `{neurons: 0.5}` (features/pruning/guide.md). null: prune
    nothing."""


def check_pruning(config: Config) -> None:
    """Raise ValueError if other keys contradict train.prune."""
    train, prune = config.train, config.train.prune
    if prune is None:
        return
    is_sized = getattr(config.model, "size", None) == "auto"
    conflicts = [
        ("train.lora_rank", train.lora_rank is not None, "does not train the matrices"),
        ("model.size=auto", is_sized, "chooses the shape itself; set the shape"),
        (
            "train.patience",
            train.patience is not None,
            "may end the run before pruning is complete",
        ),
        ("train.parallel=fsdp", train.parallel == "fsdp", "splits the matrices; use ddp"),
    ]
    for key, is_set, reason in conflicts:
        if is_set:
            raise ValueError(f"train.prune cannot be combined with {key}, which {reason}")
    if prune.by != "gates":
        return
    conflicts = [
        ("train.ema_decay", train.ema_decay is not None, "averages weights without gates"),
        (
            "train.precision=fp16",
            train.precision == "fp16",
            "scales the gradients; use bf16 or fp32",
        ),
    ]
    for key, is_set, reason in conflicts:
        if is_set:
            raise ValueError(f"train.prune.by=gates cannot be combined with {key}, which {reason}")
