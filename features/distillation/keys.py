"""Keys of train.distill, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from thinker.training.config.types import ConfigSection, Fraction, PathText, Positive

if TYPE_CHECKING:
    from thinker.training.config.config import Config


class DistillConfig(ConfigSection):
    """Learning from a teacher beside the text (features/distillation/guide.md)."""

    teacher: Annotated[PathText, Field(examples=["runs/large"])]
    """Run directory, checkpoint or Hugging Face folder of the teacher, which must have the same
    tokenizer."""
    weight: Fraction = 1.0
    """Share of the loss that compares the logits with the teacher's; the rest compares them with
    the text."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divide the logits of both models by this before they are compared."""
    attention: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Weight of the KL divergence between the attention weights of both models."""
    hidden: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Weight of the difference between the similarities of positions in both models."""
    cached_logits: Positive | None = None
    """Keep this many of the teacher's largest logits per token on disk, so that it reads the text
    once. null: keep none."""

    @model_validator(mode="after")
    def _check_consistency(self) -> DistillConfig:
        if not (self.weight or self.needs_activations):
            raise ValueError(
                "weight, attention and hidden are 0, so nothing is learned from the teacher; "
                "raise one"
            )
        if self.temperature != 1 and not self.weight:
            raise ValueError("temperature has no effect without weight; remove it")
        if self.cached_logits and not self.weight:
            raise ValueError("cached_logits has no effect without weight; remove it")
        if self.cached_logits and self.needs_activations:
            raise ValueError(
                "cached_logits cannot be combined with attention or hidden, which need the "
                "whole teacher"
            )
        if self.cached_logits and self.temperature != 1:
            raise ValueError(
                "cached_logits cannot be combined with a temperature, which needs all logits; "
                "remove one"
            )
        return self

    @property
    def needs_activations(self) -> bool:
        """Whether more than the logits of both models is compared."""
        return bool(self.attention or self.hidden)


class DistillKeys(ConfigSection):
    """Keys of the section `train`."""

    distill: DistillConfig | None = None
    """Learn from a teacher, such as `{teacher: runs/large}` (features/distillation/guide.md). null:
    from text alone."""


def complete_config(tree: dict[str, Any]) -> None:
    """The student has the tokenizer of its teacher, and is not compiled if its activations are
    compared."""
    distill = tree["train"].get("distill")
    if not isinstance(distill, dict):
        return
    teacher = distill.get("teacher")
    if isinstance(teacher, str) and tree["run"].get("init_from") is None:
        tree["data"].setdefault("tokenizer", teacher)
    train = tree["train"]
    compares_activations = distill.get("attention") or distill.get("hidden")
    if compares_activations and train.get("compile", "auto") == "auto":
        train["compile"] = False  # compiled blocks hide them


def check_distillation(config: Config) -> None:
    """Raise ValueError if other keys contradict train.distill."""
    model, data, train = config.model, config.data, config.train
    distill = train.distill
    if distill is None:
        return
    is_sized = getattr(model, "size", None) == "auto"
    is_stream = any(getattr(source, "buffer_tokens", None) for source in data.text_sources())
    conflicts = [
        ("model.size=auto", is_sized, "does not count the time of the teacher; set the shape"),
        (
            "train.micro_batch_size=auto",
            train.micro_batch_size == "auto",
            "does not count the memory of the teacher; set a number",
        ),
        (
            "train.compile=true",
            train.compile is True and distill.needs_activations,
            "hides the activations; remove it, or attention and hidden",
        ),
        (
            "train.checkpoint_every_n_blocks",
            train.checkpoint_every_n_blocks and distill.attention,
            "does not keep attention weights; remove it, or attention",
        ),
        (
            "data.shift_windows=true",
            data.shift_windows and distill.cached_logits,
            "makes other windows in every epoch; remove it, or cached_logits",
        ),
        (
            "data.buffer_tokens",
            is_stream and distill.cached_logits,
            "makes windows of a stream; remove it, or cached_logits",
        ),
    ]
    for key, is_set, reason in conflicts:
        if is_set:
            raise ValueError(f"train.distill cannot be combined with {key}, which {reason}")
