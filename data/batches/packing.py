"""Tables of packed windows, kept in files beside their shards so that memory does not grow with the
corpus."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from thinker.data.corpus.file_arrays import FileArray, OpenFile
from thinker.data.corpus.shards import DamagedShard, Shard
from thinker.runtime.files import atomic_write, can_write

HASH_BYTES = 32
Table = FileArray | np.ndarray


def document_starts(shard: Shard, seq_len: int, truncate: bool) -> Table:
    """(n_windows + 1,) int64: the start of each window of "documents" packing, and the end of the
    last.

    truncate: leave out what does not fit into the window in which its document starts.
    """
    name = "whole-windows" if truncate else "windows"
    path = shard.path.with_suffix(f".{name}-{seq_len}")
    return _kept(path, lambda: _document_starts(shard.offsets[:], seq_len, truncate))


def best_fit_segments(shard: Shard, seq_len: int, truncate: bool) -> tuple[Table, Table]:
    """The segments of the windows of "best_fit" packing: (2 * n_segments,) int64, starts and ends
    in turns.

    And (n_windows + 1,) int64, the first segment of each window.
    """
    from thinker.data.batches.best_fit import pack_best_fit

    tables: list[np.ndarray] = []

    def table(index: int) -> np.ndarray:
        if not tables:  # packing is slow, and both files may be there
            tables.extend(pack_best_fit(shard.offsets[:], seq_len, truncate))
        return tables[index].reshape(-1)

    prefix = "whole-" if truncate else ""
    segments = _kept(shard.path.with_suffix(f".{prefix}segments-{seq_len}"), lambda: table(0))
    firsts = _kept(shard.path.with_suffix(f".{prefix}best-fit-{seq_len}"), lambda: table(1))
    return segments, firsts


def _kept(path: Path, make: Callable[[], np.ndarray]) -> Table:
    """A table from a file, which is written at first use; in memory if the folder is read-only.

    The last 32 bytes of the file are the sha256 of the rest.
    """
    if path.is_file():
        file = OpenFile(path, DamagedShard)
        kept = file.read(0, file.size, np.uint8)
        content = kept[:-HASH_BYTES]
        digest = kept[-HASH_BYTES:]
        if hashlib.sha256(content).digest() == digest.tobytes():
            return FileArray(file, np.dtype("<i8"), len(content) // 8)
        # Otherwise it is damaged: write it again.
    table = np.ascontiguousarray(make(), "<i8")
    if not can_write(path.parent):
        return table
    atomic_write(path, table.tobytes() + hashlib.sha256(table).digest())
    return FileArray(OpenFile(path, DamagedShard), table.dtype, len(table))


def _document_starts(offsets: np.ndarray, seq_len: int, truncate: bool) -> np.ndarray:
    # After a window that starts at document i, the next starts at next_document[i]: after all that
    # fit, at least one.
    fitting = np.searchsorted(offsets, offsets[:-1] + seq_len, side="right") - 1
    next_document = np.maximum(fitting, np.arange(1, len(offsets)))
    following = next_document.tolist()
    firsts = []  # the document at the start of each window
    document = 0
    while document < len(following):
        firsts.append(document)
        document = following[document]

    # A document that is longer than a window is cut into several.
    begin = offsets[firsts]
    if truncate:
        return np.append(begin, offsets[-1])
    end = offsets[next_document[firsts]]
    n_pieces = -(-(end - begin) // seq_len)
    n_pieces_before = np.cumsum(n_pieces) - n_pieces
    piece = np.arange(n_pieces.sum()) - np.repeat(n_pieces_before, n_pieces)
    starts = np.repeat(begin, n_pieces) + piece * seq_len
    return np.append(starts, offsets[-1])
