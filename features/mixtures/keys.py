"""Keys of data.sources, and what they cannot be combined with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from thinker.training.config.source_section import TextSource
from thinker.training.config.types import ConfigSection, Positive, Rate

if TYPE_CHECKING:
    from thinker.training.config.config import Config

MAX_WEIGHT = 1e9


class MixedSource(TextSource):
    """A source in data.sources. All other keys of the section data hold for all sources."""

    source: Annotated[str, Field(examples=["jsonl"])]
    """Source of the text, as in data.source."""
    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")] | None = None
    """Name in messages and metrics. null: the name of the file, folder or dataset, or else of the
    source."""
    weight: float | dict[float, float] = 1.0
    """Share of the training tokens, relative to the other sources; or several, by the fraction of
    the run at which they start, such as `{0: 0.8, 0.7: 0.2}`."""
    max_epochs: Rate | None = None
    """Read the source at most this many times; then the other sources share its weight. null: no
    limit."""
    max_tokens: Positive | None = None
    """Read at most this many tokens of the source; then the other sources share its weight. null:
    no limit."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the documents held out for validation; 0: none. null: data.val_fraction."""
    assistant_only_loss: bool | None = None
    """Compute the loss only on the assistant's messages in conversations. null:
    data.assistant_only_loss."""

    @model_validator(mode="after")
    def _check_weights(self) -> MixedSource:
        starts, weights = self.weights.keys(), self.weights.values()
        are_starts_valid = all(0 <= start < 1 for start in starts)
        are_weights_valid = all(0 <= weight <= MAX_WEIGHT for weight in weights)
        if not are_starts_valid or not are_weights_valid:
            wanted = "weights must be from 0 to 1e9, and their starts at least 0 and below 1"
            raise ValueError(f"weight is {self.weight}; {wanted}")
        if 0 not in starts:
            raise ValueError(
                f"weight is {self.weight}; it needs a weight for 0, the start of the run"
            )
        if not any(weights):
            raise ValueError("weight is 0 for the whole run; remove the source")
        return self

    @property
    def weights(self) -> dict[float, float]:
        """The weights by the share of the run where they start."""
        return self.weight if isinstance(self.weight, dict) else {0.0: self.weight}

    @property
    def label(self) -> str:
        """The name in messages and metrics."""
        if self.name or not self.path:
            return self.name or self.source
        # The last part of the path that is no glob.
        parts = [part for part in Path(self.path).parts if not re.search(r"[*?\[]", part)]
        name = Path(parts[-1]).name.partition(".")[0] if parts else ""
        return re.sub(r"[^\w-]+", "-", name).strip("-") or self.source


class MixtureKeys(ConfigSection):
    """Keys of the section `data`."""

    sources: list[MixedSource] | None = None
    """Several sources with weights, instead of source and its options
    (features/mixtures/guide.md)."""

    def text_sources(self) -> list[TextSource]:
        """The sources of a mixture, or the only one."""
        if self.sources is None:
            return super().text_sources()
        return self.sources

    def source_names(self) -> list[str]:
        """The labels of the sources of a mixture, or the name of the only source."""
        if self.sources is None:
            return super().source_names()
        return [source.label for source in self.sources]

    def corpus_options(self, source: TextSource) -> dict[str, Any]:
        """As of the section without this feature; a source may have options of its own."""
        options = super().corpus_options(source)
        for key in ("val_fraction", "assistant_only_loss"):
            own = getattr(source, key)
            if own is not None:
                options[key] = own
        return options

    @model_validator(mode="after")
    def _check_sources(self) -> MixtureKeys:
        if self.sources is None:
            return self
        if not self.sources:
            raise ValueError("sources is empty; add a source, or remove the key")
        for key in TextSource.model_fields:
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} cannot be combined with data.sources; remove it, or set it in one "
                    f"of the sources"
                )
        if self.val_tokens is not None:
            raise ValueError("val_tokens cannot be combined with data.sources; remove it")
        labels = [source.label for source in self.sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"sources has two sources called {label}; give one of them another name"
                )
        return self


def leave_source_open(tree: dict[str, Any]) -> None:
    """A mixture has no source of its own."""
    if tree["data"].get("sources") is not None:
        tree["data"].setdefault("source", None)


def check_mixture(config: Config) -> None:
    """Raise ValueError if the weights change in a run without a length."""
    if config.train.max_steps is not None:
        return
    if any(len(source.weights) > 1 for source in config.data.sources or ()):
        raise ValueError("data.sources has weights that change, which need train.max_steps; set it")
