"""A random sample of the training text of a source, to train a tokenizer on."""

import hashlib
import heapq
from collections.abc import Iterable

from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument
from thinker.runtime.process.progress import Progress

SCANNED_BYTES = 1 << 30  # of each source; the sample is taken from these


def sample_texts(
    source: Source, documents: Iterable[SplitDocument], max_bytes: int, progress: bool = False
) -> tuple[list[str], list[SplitDocument] | None]:
    """A sample of the training split of a source, of about `max_bytes`, in the order of the source.

    Keeps the texts whose hashed numbers are lowest, so that the sample depends only on the source.
    Reads at most SCANNED_BYTES; of the hub, which may be read over a network, only as much as the
    sample needs.

    documents: those of the source, of both splits. Returns the sample, and the documents that were
    read, which may be all; None if they were too long to keep.
    """
    kept: list[tuple[bytes, int, str]] = []  # a heap: (inverted hash, number, text)
    kept_bytes = 0
    read: list[SplitDocument] | None = []
    read_bytes = 0
    limit = SCANNED_BYTES
    if source.name == "hub":
        limit = max_bytes
    with Progress(
        desc=f"sampling {source.name}", unit="B", unit_scale=True, disable=not progress, leave=False
    ) as bar:
        for number, (split, document) in enumerate(documents):
            n_bytes = len(document.text.encode())
            read_bytes += n_bytes
            bar.update(n_bytes)
            if read is not None:
                read.append((split, document))
            if split == "train":
                heapq.heappush(kept, (_inverted_hash(number), number, document.text))
                kept_bytes += n_bytes
            # The heap drops the documents with the highest hashes.
            while kept_bytes > max_bytes and len(kept) > 1:
                _, _, dropped = heapq.heappop(kept)
                kept_bytes -= len(dropped.encode())
            if read_bytes >= limit:
                break
            if read_bytes > max_bytes:
                read = None  # too long to keep
    kept.sort(key=lambda item: item[1])  # by number
    return [text for _, _, text in kept], read


def _inverted_hash(number: int) -> bytes:
    """The hash of a document's number, inverted: a heap drops its lowest item first."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return bytes(255 - byte for byte in digest[:8])
