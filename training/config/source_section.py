"""Keys of a source of text, and of a source in a mixture."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from thinker.training.config.types import MAX_COUNT, ConfigSection, Fraction, Positive, Rate

MAX_WEIGHT = 1e9


class TextSource(ConfigSection):
    """Where the text comes from: the options of data.sources.open_source."""

    source: str | None = None
    """tales (the default), text, jsonl, parquet, hub, pysource or repeated_random (docs/guides/your-data.md)."""
    path: str | None = None
    """File, folder or glob to read, or name of the Hugging Face dataset."""
    config: str | None = None
    """Configuration name of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset to read. null: train."""
    column: str | None = None
    """Column with the text in a jsonl, parquet or hub source. null: text, or the column or columns of a conversation if
    the first row has no text."""
    streaming: bool | None = None
    """Stream a hub dataset instead of downloading it first. null: true."""
    max_documents: Positive | None = None
    """Maximum number of documents to read; not allowed for a single text file. null: all."""
    buffer_tokens: Positive | None = None
    """Train while the source is tokenized, with about this many tokens on disk at most (docs/guides/streams.md). null:
    tokenize all of it first."""

    def source_options(self) -> dict[str, Any]:
        """The options of data.sources.open_source that are set, including `source`."""
        return self.model_dump(
            include=set(TextSource.model_fields) - {"buffer_tokens"}, exclude_none=True
        )


class CleanConfig(ConfigSection):
    """Which documents to drop before training. Rules that are null are off. Each source is cleaned on its own."""

    min_characters: Positive | None = None
    """Drop shorter documents."""
    max_characters: Positive | None = None
    """Drop longer documents."""
    max_repeated_lines: Fraction | None = None
    """Drop documents with a larger share of their characters in lines that have occurred before."""
    max_symbols: Fraction | None = None
    """Drop documents with a larger share of characters that are neither letters, digits nor white space."""
    duplicates: Literal["exact", "near"] | None = None
    """exact: of equal documents, keep one. near: of equal or similar documents, keep one, whatever their split. null:
    keep all."""

    @model_validator(mode="after")
    def _check_rules(self) -> "CleanConfig":
        if all(value is None for value in self.model_dump().values()):
            raise ValueError(
                "min_characters and all other rules are null; set one, or remove data.clean"
            )
        if (self.min_characters or 0) > (self.max_characters or MAX_COUNT):
            raise ValueError(
                f"min_characters ({self.min_characters}) is above max_characters ({self.max_characters})"
            )
        return self


class MixedSource(TextSource):
    """A source in data.sources. All other keys of the section data hold for all sources."""

    source: str
    """Source of the text, as in data.source."""
    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")] | None = None
    """Name in messages and metrics. null: the name of the file, folder or dataset, or else of the source."""
    weight: float | dict[float, float] = 1.0
    """Share of the training tokens, relative to the other sources; or several, by the fraction of the run at which they
    start, such as `{0: 0.8, 0.7: 0.2}`."""
    max_epochs: Rate | None = None
    """Read the source at most this many times; then the other sources share its weight. null: no limit."""
    max_tokens: Positive | None = None
    """Read at most this many tokens of the source; then the other sources share its weight. null: no limit."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the documents held out for validation; 0: none. null: data.val_fraction."""
    assistant_only_loss: bool | None = None
    """Compute the loss only on the assistant's messages in conversations. null: data.assistant_only_loss."""

    @model_validator(mode="after")
    def _check_weights(self) -> "MixedSource":
        starts, weights = self.weights.keys(), self.weights.values()
        if not all(0 <= start < 1 for start in starts) or not all(
            0 <= weight <= MAX_WEIGHT for weight in weights
        ):
            wanted = "weights must be from 0 to 1e9, and their starts at least 0 and below 1"
            raise ValueError(f"weight is {self.weight}; {wanted}")
        if 0 not in starts:
            raise ValueError(
                f"weight is {self.weight}; it needs a weight for 0, the start of the run"
            )
        if not any(weights):
            raise ValueError("weight is 0 for the whole run; remove the source")
        if self.buffer_tokens and self.max_epochs:
            raise ValueError(
                "max_epochs cannot be combined with buffer_tokens, as the size is unknown; set max_tokens"
            )
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
        parts = [
            part for part in Path(self.path).parts if not re.search(r"[*?\[]", part)
        ]  # without globs
        name = Path(parts[-1]).name.partition(".")[0] if parts else ""
        return re.sub(r"[^\w-]+", "-", name).strip("-") or self.source
