"""The key buffer_tokens of a source, and what it cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinker.training.config.types import ConfigSection, Positive

if TYPE_CHECKING:
    from thinker.training.config.config import Config


class StreamKeys(ConfigSection):
    """Keys of a source of text."""

    buffer_tokens: Positive | None = None
    """Train while the source is tokenized, with about this many tokens on disk at most
    (features/streams/guide.md). null: tokenize all of it first."""

    def prepared_options(self) -> dict[str, Any]:
        """Of a stream, its start is tokenized before training; the validation split is in it."""
        options = super().prepared_options()
        if self.buffer_tokens is not None:
            from thinker.features.streams.stream_index import HEAD_BYTES

            options["first_bytes"] = HEAD_BYTES
        return options


def check_streams(config: Config) -> None:
    """Raise ValueError if other keys contradict buffer_tokens."""
    data = config.data
    sources = data.text_sources()
    if not any(source.buffer_tokens for source in sources):
        return
    if getattr(data, "clean", None) is not None:
        raise ValueError(
            "data.clean cannot be combined with buffer_tokens, as it reads the whole source first"
        )
    if sources == [data]:
        if data.shift_windows:
            raise ValueError("data.shift_windows has no effect with buffer_tokens; remove it")
        return
    for number, source in enumerate(sources):
        if source.buffer_tokens and source.max_epochs:
            raise ValueError(
                f"data.sources.{number}.max_epochs cannot be combined with buffer_tokens, as "
                f"the size is unknown; "
                "set max_tokens"
            )
