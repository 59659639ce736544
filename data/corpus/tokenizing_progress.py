"""The progress bar of tokenization: share of the source, documents, tokens per second, and the time
left."""

from typing import Any

from thinker.data.text.document import Document
from thinker.data.text.sources import Source
from thinker.runtime.process.progress import Progress

UPDATE_TOKENS = 1 << 17  # between updates of the text
KNOWN = "{desc}: {percentage:3.0f}%|{bar}|{postfix} [{elapsed}<{remaining}]"
UNKNOWN = "{desc}{postfix} [{elapsed}]"  # the size of the source is unknown


class TokenizingProgress:
    """Context manager that shows how much of a source is tokenized.

    n_before: documents that an earlier process has tokenized.
    """

    def __init__(self, source: Source, n_before: int, progress: bool) -> None:
        self.source = source
        self.n_documents = n_before
        self.n_bytes = 0
        self.n_tokens = 0
        self.shown = 0  # the number of tokens in the text beside the bar
        self.share: float | None = None  # of the source, if known
        self.bar = Progress(desc="tokenizing", total=1.0, disable=not progress, bar_format=UNKNOWN)

    def __enter__(self) -> "TokenizingProgress":
        return self

    def __exit__(self, *error: Any) -> None:
        self._show()
        self.bar.refresh()
        self.bar.close()

    def update(self, document: Document, n_bytes: int, n_tokens: int) -> None:
        """Count a document."""
        self.n_documents += 1
        self.n_bytes += n_bytes
        self.n_tokens += n_tokens
        if self.source.whole_text:
            self.share = self.n_bytes / max(self.source.n_bytes, 1)
        elif self.source.n_documents is not None:
            self.share = self.n_documents / self.source.n_documents
        else:
            self.share = document.share_read
        if self.n_tokens >= self.shown + UPDATE_TOKENS:
            self._show()

    def _show(self) -> None:
        if self.bar.disable:
            return
        self.shown = self.n_tokens
        if self.share is not None and self.bar.bar_format == UNKNOWN:
            self.bar.bar_format = KNOWN
            self.bar.initial = self.share
        rate = self.n_tokens / max(self.bar.format_dict["elapsed"], 1e-9)
        documents = "" if self.source.whole_text else f"{self.n_documents:,} documents, "
        self.bar.set_postfix_str(
            f"{documents}{self.n_tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False
        )
        advance = 0.0
        if self.share is not None:
            advance = min(self.share, 1.0) - self.bar.n
        self.bar.update(advance)  # of 0, too, which shows the text
