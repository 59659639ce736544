"""Keys of a source of text."""

from typing import Any

from thinker.training.config.types import ConfigSection, Positive, with_feature_keys


class SourceOptions(ConfigSection):
    """The options of data.text.sources.open_source."""

    source: str | None = None
    """tales (the default), text, jsonl, parquet, hub, tokens, pysource or repeated_random
    (docs/guides/your-data.md)."""
    path: str | None = None
    """File, folder or glob to read, folder of tokens, or name of the Hugging Face dataset."""
    config: str | None = None
    """Configuration name of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset to read. null: train."""
    column: str | None = None
    """Column with the text in a jsonl, parquet or hub source. null: text, or the column or columns
    of a conversation if the first row has no text."""
    allow_special_tokens: bool | None = None
    """In conversations, read names of special tokens in messages as these tokens. null: false, they
    are plain text."""
    streaming: bool | None = None
    """Stream a hub dataset instead of downloading it first. null: true."""
    max_documents: Positive | None = None
    """Maximum number of documents to read; not allowed for a single text file. null: all."""

    def source_options(self) -> dict[str, Any]:
        """The options of data.text.sources.open_source that are set, including `source`."""
        return self.model_dump(include=set(SourceOptions.model_fields), exclude_none=True)

    def prepared_options(self) -> dict[str, Any]:
        """As source_options(), for what is tokenized before training starts."""
        return self.source_options()


@with_feature_keys("source")
class TextSource(SourceOptions):
    """Where the text comes from."""
