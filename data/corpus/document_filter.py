"""The seam for filters that drop documents of a source before it is tokenized."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument


class DocumentFilter(Protocol):
    """Drops documents of one source. It reads the source twice: to decide, and to leave out."""

    config_key: str
    """The key of the config that turns it on, for messages."""
    report: dict[str, dict[str, Any]]
    """What drop() has left out, for corpus.json: by reason the count and some examples."""

    def check_source(self, source: Source) -> None:
        """Raise UserError if the source cannot be filtered."""
        ...

    def cache_key(self) -> list[Any]:
        """Values for JSON that change with the documents that are dropped. They enter the key of
        the cache."""
        ...

    def decide(self, documents: Iterable[SplitDocument], folder: Path, progress: bool) -> None:
        """Read all documents and decide which ones to drop. folder: for temporary files."""
        ...

    def drop(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        """Yield the documents that stay, of the same documents in the same order. Starts `report`
        anew."""
        ...

    def summary(self) -> str:
        """What is dropped, as one line."""
        ...
