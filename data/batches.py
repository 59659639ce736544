"""Token windows: packing of a stream of tokens, and the windows of a split in order."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinker.data.shards import DamagedShard, Shard, TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.file_array import FileArray, OpenFile
from thinker.runtime.files import atomic_write, can_write

Packing = Literal["contiguous", "documents"]


class PackedDataset:
    """Token shards split into windows of seq_len inputs and targets; targets are the tokens one position later.

    Every token except the first BOS token of each shard is a target exactly once. Padding has BOS as input and
    IGNORE_INDEX as target.

    "contiguous": consecutive windows of the stream; the last window of a shard is padded.
    "documents": a window starts at a document's BOS token and contains as many complete documents as fit, in order,
    followed by padding. A document longer than seq_len is split into consecutive windows.

    Args:
        stride: contiguous windows start this many tokens apart (default: seq_len). If they overlap, only the last
            `stride` targets of a window are counted, except in the first window of a shard.
        document_masking: number the documents of a window, so that the model can mask across them (document_ids).
        prefix_len: the first tokens of each window are context only, without targets among themselves.
    """

    def __init__(
        self, tokens: TokenShards, seq_len: int, packing: Packing, *, stride: int | None = None,
        document_masking: bool = False, prefix_len: int = 0,
    ) -> None:  # fmt: skip
        if packing not in get_args(Packing):
            raise UserError(f"data.packing={packing}: choose from {', '.join(get_args(Packing))}")
        self.tokens, self.seq_len, self.packing = tokens, seq_len, packing
        self.document_masking, self.prefix_len = document_masking, prefix_len
        self.stride = seq_len if stride is None else stride
        can_overlap = packing == "contiguous" and prefix_len <= 1
        if not 1 <= self.stride <= seq_len or (self.stride < seq_len and not can_overlap):
            only = f", or exactly {seq_len} with packed documents or a bidirectional prefix"
            raise UserError(f"the stride is {self.stride} tokens; use 1 to the context length, {seq_len}{only}")
        masked = [shard for shard in tokens.shards if document_masking and shard.loss_mask is not None]
        if any((shard.tokens[:] == shard.bos_id).sum() > len(shard.offsets) for shard in masked):
            reason = "the chat template also writes the BOS token inside conversations"
            effect = "conversations cannot be separated"
            raise UserError(f"data.document_masking=true: {reason}, so {effect}; set it to false")
        self.starts: list[FileArray | np.ndarray] = []  # "documents" only: see _packed_starts
        if packing == "documents":
            self.starts = [_packed_starts(shard, seq_len) for shard in tokens.shards]
            counts = [len(starts) - 1 for starts in self.starts]
        else:
            rest = [max(0, shard.n_tokens - 1 - seq_len) for shard in tokens.shards]  # targets after the first window
            counts = [1 + -(-n_targets // self.stride) for n_targets in rest]
        self._first_window = np.cumsum([0, *counts])  # (n_shards + 1,): first window of each shard, and the end

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def span(self, index: int, shift: int = 0) -> tuple[Shard, int, int]:
        """The shard that contains window `index`, and the positions of its first input and last target.

        `shift`: contiguous windows start this many tokens later, up to seq_len - 1; the last one of a shard ends with
        the shard. The first `shift` targets of a shard are then in no window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window index {index} is outside range({len(self)})")
        shard_index = int(np.searchsorted(self._first_window, index, side="right")) - 1
        shard, local = self.tokens.shards[shard_index], index - int(self._first_window[shard_index])
        if self.packing == "documents":
            start, end = self.starts[shard_index][local : local + 2]
            return shard, int(start), int(end)
        start = local * self.stride
        if shift:
            start = min(start + shift, max(0, shard.n_tokens - 1 - self.seq_len))
        return shard, start, min(start + self.seq_len, shard.n_tokens - 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each (T,) int64."""
        return self.window(index)

    def window(self, index: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of a window, each (T,) int64; see span() for `shift`."""
        shard, start, end = self.span(index, shift)
        tokens = shard.tokens[start : end + 1]
        inputs = np.full(self.seq_len, shard.bos_id, np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        inputs[: end - start], targets[: end - start] = tokens[:-1], tokens[1:]
        targets[: max(0, self.prefix_len - 1)] = IGNORE_INDEX
        if shard.loss_mask is not None:
            targets[: end - start][shard.loss_mask[start + 1 : end + 1] == 0] = IGNORE_INDEX
        elif shard.has_eos:
            targets[targets == shard.bos_id] = IGNORE_INDEX
        if start > 0:
            targets[: self.seq_len - self.stride] = IGNORE_INDEX
        return inputs, targets

    def batch(self, indices: Sequence[int] | np.ndarray, shifts: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of these windows, each (B, T) int64; see span() for `shifts`, one per window."""
        shifts = [0] * len(indices) if shifts is None else shifts
        inputs, targets = zip(*(self.window(int(index), shift) for index, shift in zip(indices, shifts)))
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))

    def document_ids(self, inputs: Tensor) -> Tensor | None:
        """Number each token's document in its window, and each padding token, (B, T) int64; None without masking."""
        return (inputs == self.tokens.shards[0].bos_id).cumsum(dim=1) if self.document_masking else None


def sequential_batches(
    dataset: PackedDataset, batch_size: int, limit: int | None = None, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first `limit` windows (None: all) in order as (inputs, targets); the last batch may be smaller.

    Ranks take turns. A rank without a batch in the last round gets a window whose targets are all IGNORE_INDEX.
    """
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for round_start in range(0, count, batch_size * ranks):
        start = round_start + rank * batch_size
        if start < count:
            yield dataset.batch(range(start, min(start + batch_size, count)))
        else:
            inputs, targets = dataset.batch([0])
            yield inputs, torch.full_like(targets, IGNORE_INDEX)


def entropy_floor(dataset: PackedDataset, limit: int | None = None) -> float | None:
    """Entropy floor: -sum ln P / sum (tokens + 1) over the documents in the first `limit` windows, in nats per target.

    No model that sees each document from its start can have a lower expected loss on these windows. None if ln P is
    unknown, if a document is split (as with contiguous packing), or if a prefix has no loss.
    """
    knows_log_probs = all(shard.log_probs is not None for shard in dataset.tokens.shards)
    if dataset.packing != "documents" or dataset.prefix_len > 1 or not knows_log_probs:
        return None
    nats, targets = 0.0, 0
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for shard, starts in zip(dataset.tokens.shards, dataset.starts):
        end = starts[min(count, len(starts) - 1)]
        offsets = shard.offsets[:]
        n_documents = int(np.searchsorted(offsets, end))
        if (np.diff(offsets[: n_documents + 1]) > dataset.seq_len).any():
            return None
        nats -= float(shard.log_probs[:n_documents].sum())
        targets += int(end) - shard.has_eos * n_documents  # the BOS token after an EOS token is not a target
        count -= min(count, len(starts) - 1)
    return nats / targets


def _packed_starts(shard: Shard, seq_len: int) -> FileArray | np.ndarray:
    """(n_windows + 1,) int64: start of each window of "documents" packing, and the end of the last.

    Written to a file beside the shard at first use, so that memory does not grow with the corpus; kept in memory if the
    folder is read-only. The last 32 bytes are the sha256 of the rest.
    """
    path = shard.path.with_suffix(f".windows-{seq_len}")
    if path.is_file():
        file = OpenFile(path, DamagedShard)
        kept = file.read(0, file.size, np.uint8)
        if hashlib.sha256(kept[:-32]).digest() == kept[-32:].tobytes():  # otherwise damaged: write it again
            return FileArray(file, np.dtype("<i8"), len(kept) // 8 - 4)
    offsets = shard.offsets[:]
    # After a window that starts at document i, the next starts at next_document[i]: after all that fit, at least one.
    fitting = np.searchsorted(offsets, offsets[:-1] + seq_len, side="right") - 1
    next_document = np.maximum(fitting, np.arange(1, len(offsets)))
    firsts, document, steps = [], 0, next_document.tolist()
    while document < shard.n_documents:
        firsts.append(document)
        document = steps[document]
    begin, end = offsets[firsts], offsets[next_document[firsts]]
    n_pieces = -(-(end - begin) // seq_len)  # above 1 only if a document is longer than a window
    piece = np.arange(n_pieces.sum()) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)  # index within its document
    starts = np.append(np.repeat(begin, n_pieces) + piece * seq_len, offsets[-1]).astype("<i8")
    if not can_write(path.parent):
        return starts
    atomic_write(path, starts.tobytes() + hashlib.sha256(starts).digest())
    return FileArray(OpenFile(path, DamagedShard), starts.dtype, len(starts))
