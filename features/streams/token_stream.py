"""A source that is tokenized while it is trained on, in blocks of which only a few are on disk at a
time.

FOLDER/blocks.jsonl        the record of all blocks (stream_index.py)
FOLDER/block-00012.tokens  a block: one shard of tokens
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from thinker.data.batches.dataset import Sample, Window, WindowRemoved
from thinker.data.batches.permutation import permute
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.shards import Shard, TokenShards
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.streams.stream_index import BLOCK_NAME, Block, StreamIndex, block_path
from thinker.features.streams.stream_writer import BLOCKS, StreamClosed, StreamText, StreamWriter

POLL_SECONDS = 0.05  # between looks for blocks that another process writes


class TokenStream:
    """The training windows of a stream of text, in the order of the stream except within a block,
    which is shuffled.

    An OrderedDataset: a window is a pure function of its number and of the text, as the record of
    blocks never changes. One process writes the blocks; others, which share the folder, wait for
    them.

    Args:
        open_text: opens the text; called by the process that writes.
        tokenizer: that of the text.
        buffer_tokens: about how many tokens are on disk at most.
        pack: makes the windows of a block.
        seed, source: select the order within the blocks; source is the number of the stream among
            several sources.
        progress: show a bar while training waits for the first block.
    """

    n_sources = 1
    is_endless = True

    def __init__(
        self,
        folder: Path,
        open_text: Callable[[], StreamText],
        tokenizer: Tokenizer,
        buffer_tokens: int,
        pack: Callable[[TokenShards], PackedDataset],
        seed: int,
        source: int = 0,
        progress: bool = True,
    ) -> None:
        self.folder = folder
        self.open_text = open_text
        self.tokenizer = tokenizer
        self.buffer_tokens = buffer_tokens
        self.pack = pack
        self.seed = seed
        self.source = source
        self.progress = progress
        self.index = StreamIndex(folder)
        self._writer: StreamWriter | None = None
        self._lock = threading.Lock()
        self._open: dict[int, PackedDataset] = {}  # blocks by number
        self._is_closed = False

    def start(self, n: int) -> None:
        """Begin to write, in a thread, so that training can begin at window n. Continues what is in
        the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        block_tokens = self.buffer_tokens // BLOCKS
        self._writer = StreamWriter(
            self.folder,
            self.open_text(),
            self.index,
            block_tokens,
            self._count_windows,
            self.progress,
        )
        self._writer.start(n)

    def close(self, is_finished: bool = False) -> None:
        """End the thread that writes. is_finished: remove the blocks, which the end of the run no
        longer needs."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()
        with self._lock:
            self._open.clear()
        if is_finished and self._writer is not None:
            for path in self.folder.glob(f"{BLOCK_NAME}-*"):
                path.unlink(missing_ok=True)

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset. Waits until their blocks are written. Raises UserError if the text
        cannot be read."""
        numbers = np.arange(first, first + n)
        windows = np.empty_like(numbers)
        done = 0  # samples whose window is known
        while done < n:
            block = self._wait_for_block(first + done)
            end = min(n, block.first_window + block.n_windows - first)
            places = numbers[done:end] - block.first_window
            key = (self.seed, self.source, block.number)
            windows[done:end] = block.first_window + permute(places, block.n_windows, key)
            done = end
        return [Sample(window, source=self.source) for window in windows.tolist()]

    def window(self, sample: Sample) -> Window:
        """(inputs, targets) of a window, each (T,) int64. Waits until its block is on disk.

        Raises WindowRemoved for a window before the block that precedes the one in use.
        """
        block = self._wait_for_block(sample.index)
        with self._lock:
            if block.number not in self._open:
                path = block_path(self.folder, block.number)
                self._wait(lambda: self._has(block.number))
                self._open[block.number] = self._pack(path)
            dataset = self._open[block.number]
        return dataset.window(sample.index - block.first_window)

    def epochs(self, n: int) -> list[float]:
        """How often the source has been read after n windows."""
        return [self.index.epochs(n)]

    def _wait_for_block(self, window: int) -> Block:
        block = self.index.block_of(window)
        number = len(self.index.blocks) if block is None else block.number
        with self._lock:
            # Close old blocks before the writer removes their files, as the disk keeps files that
            # are open.
            for old in list(self._open):
                if old < number - 1:
                    del self._open[old]
        if self._writer is not None:
            self._writer.want(window)
        self._wait(lambda: self.index.block_of(window) is not None)
        return self.index.block_of(window)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            if self._is_closed:
                raise StreamClosed
            if self._writer is None:
                time.sleep(POLL_SECONDS)
                self.index.refresh()
                continue
            with self._writer.changed:
                if not is_ready() and self._writer.error is None:
                    self._writer.changed.wait(POLL_SECONDS)
            if self._writer.error is not None:
                raise self._writer.error

    def _has(self, number: int) -> bool:
        """Whether a block is on disk. Raises WindowRemoved if it was removed."""
        if self._writer is not None:
            return self._writer.has(number)
        if block_path(self.folder, number).exists():
            return True
        later = range(number + 1, number + BLOCKS)
        if any(block_path(self.folder, each).exists() for each in later):
            raise WindowRemoved
        return False

    def _pack(self, path: Path) -> PackedDataset:
        shard = Shard.open(path, self.tokenizer)
        return self.pack(TokenShards([shard]))

    def _count_windows(self, path: Path) -> int:
        return len(self._pack(path))
