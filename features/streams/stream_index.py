"""The record of a stream: one line per block of tokens that was ever written, which fixes the order
of the stream."""

import json
import os
import threading
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path

from thinker.data.text.document import Start
from thinker.runtime.files import atomic_write

INDEX = "blocks.jsonl"
HEAD_BYTES = 1 << 26  # at the start of a stream: the validation split, and text for the tokenizer
BLOCK_NAME = "block"


@dataclass(frozen=True)
class Block:
    """A block of a stream."""

    number: int
    first_window: int  # its first training window, counted over the whole stream
    n_windows: int
    n_tokens: int
    n_documents: int
    sha256: str  # of its file
    last: Start  # where its last document is in the source
    last_sha256: str  # of the text of that document
    epoch: int  # of that document, from 0
    share: float  # of the source, up to and with that document; 0 if unknown

    @property
    def epochs(self) -> float:
        """How often the source has been read up to the end of the block."""
        return self.epoch + self.share


class StreamIndex:
    """The blocks of a stream, in a file that one process appends to and others read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / INDEX
        self.blocks: list[Block] = []
        self._n_bytes = 0  # of the file that are read
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read the lines that were added to the file."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._n_bytes)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            try:
                values = json.loads(line)
                block = Block(**values | {"last": tuple(values["last"])})
            except (ValueError, KeyError, TypeError):
                return  # not yet complete, or damaged
            if block.number != len(self.blocks) or not line.endswith(b"\n"):
                return
            self.blocks.append(block)
            self._n_bytes += len(line)

    def repair(self) -> None:
        """Remove the lines from the first damaged or incomplete one. Their blocks are recorded
        again."""
        self.refresh()
        if self.path.exists() and self.path.stat().st_size > self._n_bytes:
            atomic_write(self.path, self.path.read_bytes()[: self._n_bytes])

    def append(self, block: Block) -> None:
        """Add the next block."""
        with self.path.open("ab") as file:
            file.write(json.dumps(asdict(block)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.refresh()

    @property
    def n_windows(self) -> int:
        """The windows of all blocks."""
        if not self.blocks:
            return 0
        last = self.blocks[-1]
        return last.first_window + last.n_windows

    def block_of(self, window: int) -> Block | None:
        """The block of a window; None if it has not been recorded yet."""
        if window >= self.n_windows:
            return None
        n_begun = bisect_right(self.blocks, window, key=lambda block: block.first_window)
        return self.blocks[n_begun - 1]

    def epochs(self, window: int) -> float:
        """How often the source has been read before a window; of the windows that are recorded, at
        most."""
        block = self.block_of(window)
        if block is None:
            return self.blocks[-1].epochs if self.blocks else 0.0
        before = 0.0
        if block.number > 0:
            before = self.blocks[block.number - 1].epochs
        return before + (block.epochs - before) * (window - block.first_window) / block.n_windows


def block_path(folder: Path, number: int) -> Path:
    """The file of a block, as ShardWriter names it."""
    return folder / f"{BLOCK_NAME}-{number:05d}.tokens"
