"""Writing of the blocks of a stream, in a thread beside the training."""

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from thinker.data.batches.dataset import WindowRemoved
from thinker.data.corpus.encoding import BATCH_CHARS, Encoded, encode_documents
from thinker.data.corpus.llmc_tokens import read_documents
from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.text.document import BEGIN, Document
from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument, empty_split_error, split_documents
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.streams.stream_index import BLOCK_NAME, Block, StreamIndex, block_path
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.reading import sha256_of_file

BLOCKS = 4  # in the buffer: the one before the block in use, the block in use, and two after it
ONE_SHARD = 1 << 62  # tokens; a block is not split


@dataclass(frozen=True)
class StreamText:
    """The training split of a source, which is read again when it ends."""

    source: Source
    tokenizer: Tokenizer
    val_fraction: float
    val_tokens: str | None = None
    assistant_only_loss: bool = False

    def encoded(
        self, previous: Block | None, n_tokens: int
    ) -> Iterator[tuple[SplitDocument, list[Encoded]]]:
        """The documents after those of a block (None: all) with their encodings, without end;
        n_tokens: in a block."""
        documents = self._documents() if previous is None else self._documents_after(previous)
        batch_chars = min(n_tokens, BATCH_CHARS)  # do not read far beyond the block
        return encode_documents(self.tokenizer, documents, self.assistant_only_loss, batch_chars)

    def _documents(self, start: tuple = BEGIN) -> Iterator[SplitDocument]:
        while True:
            source = replace(self.source, documents=partial(self.source.documents, start))
            validation: Iterable[Document] = ()
            if self.val_tokens is not None:
                validation = read_documents(self.val_tokens, self.tokenizer)
            is_empty = True
            for split, document in split_documents(source, self.val_fraction, validation):
                if split == "train":
                    is_empty = False
                    yield split, document
            if is_empty and start == BEGIN:
                raise empty_split_error("train", self.source, self.val_fraction)
            start = BEGIN

    def _documents_after(self, block: Block) -> Iterator[SplitDocument]:
        """The documents after those of a block. Its last one is read again, to see that the place
        is right.

        If it is not (files were added or renamed, or the library datasets lost the place), the
        source is read from the start. Raises UserError if the document is not there.
        """
        with contextlib.suppress(UserError):
            documents = self._documents(block.last)
            if _hash(next(documents)[1]) == block.last_sha256:
                return documents
        number = block.last[0]
        name = f"data.source={self.source.name}"
        again = f"reading its first {number + 1:,} documents again to find the place"
        print(f"{name}: {again}", file=sys.stderr)
        documents = self._documents()
        for _, document in documents:
            if document.number == number and _hash(document) == block.last_sha256:
                return documents
            if document.number >= number:
                break
        reason = f"document {number + 1:,} is not the one that the run has read last"
        raise UserError(f"{name}: {reason}; undo what has changed before it in the text")


class StreamWriter:
    """Writes the blocks of a stream while training reads them, and removes those that it no longer
    needs.

    At most BLOCKS blocks are on disk. A block ends with the document that reaches `block_tokens`.
    Which documents it has does not depend on time or interruptions: a block that is written again
    has the same tokens as before.

    count_windows: the number of training windows in the block of a path.
    """

    def __init__(
        self,
        folder: Path,
        text: StreamText,
        index: StreamIndex,
        block_tokens: int,
        count_windows: Callable[[Path], int],
        progress: bool,
    ) -> None:
        self.folder = folder
        self.text = text
        self.index = index
        self.block_tokens = block_tokens
        self.count_windows = count_windows
        self.progress = progress
        self.error: Exception | None = None  # what ended the thread
        # Notified when a block was written or is wanted, or when the thread ends.
        self.changed = threading.Condition()
        self._ready = range(0)  # the blocks on disk, also of those that are recorded
        self._wanted = 0  # the last window that was asked for
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, window: int) -> None:
        """Verify the blocks on disk from that of `window` on, remove all others, and write on in a
        thread."""
        self.index.repair()
        self._wanted = window
        first = self.block_in_use()
        number = first
        end = min(len(self.index.blocks), first + BLOCKS - 1)
        while number < end and self._is_valid(number):
            number += 1
        self._ready = range(first, number)
        kept = {block_path(self.folder, n).stem for n in self._ready}
        for path in self.folder.glob(f"{BLOCK_NAME}-*"):
            if path.stem not in kept:
                path.unlink()
        self._thread = threading.Thread(
            target=self._run, args=(number,), name="stream", daemon=True
        )
        self._thread.start()

    def want(self, window: int) -> None:
        """Request the blocks up to that of a window. Raises the error that ended the thread, if
        any."""
        with self.changed:
            if window > self._wanted:
                self._wanted = window
                self.changed.notify_all()
        if self.error is not None:
            raise self.error

    def block_in_use(self) -> int:
        """The block of the last window that training wants; the next one to be recorded, if that is
        not known yet."""
        block = self.index.block_of(self._wanted)
        return len(self.index.blocks) if block is None else block.number

    def has(self, number: int) -> bool:
        """Whether a block is on disk. Raises WindowRemoved if it was removed."""
        if number < self.block_in_use() - 1:
            raise WindowRemoved
        return number in self._ready

    def close(self) -> None:
        """End the thread."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2)  # it may wait for a network

    def _run(self, number: int) -> None:
        try:
            self._write(number)
        except Exception as error:  # whatever ended the thread, the threads that read raise it
            self.error = None if self._is_closed else error
        with self.changed:
            self.changed.notify_all()

    def _write(self, number: int) -> None:
        """Write blocks from `number` on until the writer is closed."""
        previous = None
        epoch = 0
        last_number = -1
        if number > 0:
            previous = self.index.blocks[number - 1]
            epoch = previous.epoch
            last_number = previous.last[0]
        with contextlib.closing(self.text.encoded(previous, self.block_tokens)) as encoded:
            while self._wait_for_room(number):
                epoch, last_number = self._write_block(number, encoded, epoch, last_number)
                number += 1

    def _write_block(
        self,
        number: int,
        encoded: Iterator[tuple[SplitDocument, list[Encoded]]],
        epoch: int,
        last_number: int,
    ) -> tuple[int, int]:
        """Write the next block. Returns the epoch and the number of its last document."""
        shard = ShardWriter(self.folder, BLOCK_NAME, self.text.tokenizer, ONE_SHARD, number=number)
        n_documents = 0
        try:
            with self._bar(number) as bar:
                for (_, document), rows in encoded:
                    if self._is_closed:
                        raise StreamClosed
                    n_bytes = len(document.text.encode())
                    shard.add_rows(rows, n_bytes, document.log_prob)
                    n_documents += 1
                    if document.number <= last_number:  # the source was begun again
                        epoch += 1
                    last_number = document.number
                    bar.update(shard.n_tokens - bar.n)
                    if shard.n_tokens >= self.block_tokens:
                        break
            shard.close()
        except BaseException:
            shard.discard()  # so that a full disk does not stay full
            raise
        path = block_path(self.folder, number)
        is_new = number == len(self.index.blocks)
        block = Block(
            number=number,
            first_window=self.index.n_windows,
            n_windows=self.count_windows(path),
            n_tokens=shard.n_tokens,
            n_documents=n_documents,
            sha256=sha256_of_file(path),
            last=document.start,
            last_sha256=_hash(document),
            epoch=epoch,
            share=self._share(document),
        )
        if is_new:
            self.index.append(block)
        elif self.index.blocks[number].sha256 != block.sha256:
            path.unlink()
            name = f"data.source={self.text.source.name}"
            raise UserError(f"{name}: the text has changed since the run read it")
        with self.changed:
            self._ready = range(self._ready.start, number + 1)
            self.changed.notify_all()
        return epoch, last_number

    def _bar(self, number: int) -> Progress:
        """A progress bar, which is shown if training waits for the block."""
        is_waited_for = number == self.block_in_use()
        which = "first" if number == 0 else "next"
        return Progress(
            desc=f"tokenizing the {which} part of {self.text.source.name}",
            total=self.block_tokens,
            unit=" tokens",
            unit_scale=True,
            leave=False,
            disable=not (self.progress and is_waited_for),
        )

    def _share(self, document: Document) -> float:
        n_documents = self.text.source.n_documents
        if n_documents is not None:
            return (document.number + 1) / n_documents
        return document.share_read or 0.0

    def _wait_for_room(self, number: int) -> bool:
        """Wait until block `number` fits into the buffer, and remove old blocks. Returns False if
        closed."""
        with self.changed:
            while not self._is_closed and number > self.block_in_use() + BLOCKS - 2:
                self.changed.wait()
        for path in self.folder.glob(f"{BLOCK_NAME}-*"):
            if int(path.stem.rpartition("-")[2]) < self.block_in_use() - 1:
                with contextlib.suppress(PermissionError):  # an open file, on Windows
                    path.unlink()
        return not self._is_closed

    def _is_valid(self, number: int) -> bool:
        path = block_path(self.folder, number)
        return path.exists() and sha256_of_file(path) == self.index.blocks[number].sha256


class StreamClosed(Exception):
    """Ends the thread of a writer that was closed, and those that wait for it."""


def _hash(document: Document) -> str:
    return hashlib.sha256(document.text.encode()).hexdigest()
