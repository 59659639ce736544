"""Keys of train.distill, and what they cannot be combined with."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from thinker.training.config.data_section import DataConfig
from thinker.training.config.types import ConfigSection, Fraction, PathText, Positive


class DistillConfig(ConfigSection):
    """Learning from a teacher beside the text (docs/guides/smaller-models.md)."""

    teacher: PathText
    """Run directory, checkpoint or Hugging Face folder of the teacher, which must have the same tokenizer."""
    weight: Fraction = 1.0
    """Share of the loss that compares the logits with the teacher's; the rest compares them with the text."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divide the logits of both models by this before they are compared."""
    attention: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Weight of the KL divergence between the attention weights of both models."""
    hidden: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Weight of the difference between the similarities of positions in both models."""
    cached_logits: Positive | None = None
    """Keep this many of the teacher's largest logits per token on disk, so that it reads the text once. null: keep
    none."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "DistillConfig":
        if not (self.weight or self.needs_activations):
            raise ValueError(
                "weight, attention and hidden are 0, so nothing is learned from the teacher; raise one"
            )
        if self.temperature != 1 and not self.weight:
            raise ValueError("temperature has no effect without weight; remove it")
        if self.cached_logits and not self.weight:
            raise ValueError("cached_logits has no effect without weight; remove it")
        if self.cached_logits and self.needs_activations:
            raise ValueError(
                "cached_logits cannot be combined with attention or hidden, which need the whole teacher"
            )
        if self.cached_logits and self.temperature != 1:
            raise ValueError(
                "cached_logits cannot be combined with a temperature, which needs all logits; remove one"
            )
        return self

    @property
    def needs_activations(self) -> bool:
        """Whether more than the logits of both models is compared."""
        return bool(self.attention or self.hidden)


def teacher_path(tree: dict[str, Any]) -> str | None:
    """train.distill.teacher in a config that has not been validated; None if there is none."""
    for key in ("train", "distill", "teacher"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, str) else None


def check_distillation(train: Any, model: Any, data: DataConfig) -> None:
    """Raise ValueError if keys of the sections train, model and data contradict train.distill."""
    distill = train.distill
    if distill is None:
        return
    is_stream = any(source.buffer_tokens for source in data.text_sources())
    for key, is_set, reason in (
        ("model.size=auto", model.size == "auto", "does not count the time of the teacher; set the shape"),
        ("train.micro_batch_size=auto", train.micro_batch_size == "auto",
         "does not count the memory of the teacher; set a number"),
        ("train.compile=true", train.compile is True and distill.needs_activations,
         "hides the activations; remove it, or attention and hidden"),
        ("train.checkpoint_every_n_blocks", train.checkpoint_every_n_blocks and distill.attention,
         "does not keep attention weights; remove it, or attention"),
        ("data.shift_windows=true", data.shift_windows and distill.cached_logits,
         "makes other windows in every epoch; remove it, or cached_logits"),
        ("data.buffer_tokens", is_stream and distill.cached_logits,
         "makes windows of a stream; remove it, or cached_logits"),
    ):  # fmt: skip
        if is_set:
            raise ValueError(f"train.distill cannot be combined with {key}, which {reason}")
