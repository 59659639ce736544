"""Token windows: packing of a stream of tokens, and the windows of a split in order."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.packing import Table, best_fit_segments, document_starts
from thinker.data.corpus.shards import Shard, TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

Packing = Literal["contiguous", "documents", "best_fit"]


class WindowRemoved(Exception):
    """Error for a window whose text was there once, and is no longer on the disk."""


class PackedDataset:
    """Token shards split into windows of seq_len inputs and targets; targets are the tokens one position later.

    Every token except the first BOS token of each shard is a target exactly once. Padding has BOS as input and
    IGNORE_INDEX as target.

    "contiguous": consecutive windows of the stream; the last window of a shard is padded.
    "documents": a window starts at a document's BOS token and contains as many complete documents as fit, in order,
    followed by padding. A document longer than seq_len is split into consecutive windows.
    "best_fit": windows contain complete documents in any order, chosen so that there is little padding. Of a document
    longer than seq_len, the last piece shares its window with other documents.

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
            raise UserError(
                f"the stride is {self.stride} tokens; use 1 to the context length, {seq_len}{only}"
            )
        masked = [
            shard for shard in tokens.shards if document_masking and shard.loss_mask is not None
        ]
        if any((shard.tokens[:] == shard.bos_id).sum() > len(shard.offsets) for shard in masked):
            reason = "the chat template also writes the BOS token inside conversations"
            effect = "conversations cannot be separated"
            raise UserError(f"data.document_masking=true: {reason}, so {effect}; set it to false")
        self.starts: list[Table] = []  # "documents" only
        self.segments: list[tuple[Table, Table]] = []  # "best_fit" only
        if packing == "documents":
            self.starts = [document_starts(shard, seq_len) for shard in tokens.shards]
            counts = [len(starts) - 1 for starts in self.starts]
        elif packing == "best_fit":
            self.segments = [best_fit_segments(shard, seq_len) for shard in tokens.shards]
            counts = [len(firsts) - 1 for _, firsts in self.segments]
        else:
            rest = [
                max(0, shard.n_tokens - 1 - seq_len) for shard in tokens.shards
            ]  # targets after the first window
            counts = [1 + -(-n_targets // self.stride) for n_targets in rest]
        self._first_window = np.cumsum(
            [0, *counts]
        )  # (n_shards + 1,): first window of each shard, and the end

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def first_window(self, shard: int) -> int:
        """The index of the first window of a shard; for the number of shards, the number of windows."""
        return int(self._first_window[shard])

    def spans(self, index: int, shift: int = 0) -> tuple[Shard, list[tuple[int, int]]]:
        """The shard that contains window `index`, and the positions of the first input and last target of its parts.

        `shift`: contiguous windows start this many tokens later, up to seq_len - 1; the last one of a shard ends with
        the shard. The first `shift` targets of a shard are then in no window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window index {index} is outside range({len(self)})")
        shard_index = int(np.searchsorted(self._first_window, index, side="right")) - 1
        shard, local = self.tokens.shards[shard_index], index - int(self._first_window[shard_index])
        if self.packing == "documents":
            start, end = self.starts[shard_index][local : local + 2]
            return shard, [(int(start), int(end))]
        if self.packing == "best_fit":
            segments, firsts = self.segments[shard_index]
            first, after = firsts[local : local + 2].tolist()
            return shard, [*map(tuple, segments[2 * first : 2 * after].reshape(-1, 2).tolist())]
        start = local * self.stride
        if shift:
            start = min(start + shift, max(0, shard.n_tokens - 1 - self.seq_len))
        return shard, [(start, min(start + self.seq_len, shard.n_tokens - 1))]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each (T,) int64."""
        return self.window(index)

    def window(self, index: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of a window, each (T,) int64; see spans() for `shift`."""
        shard, spans = self.spans(index, shift)
        inputs = np.full(self.seq_len, shard.bos_id, np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        at = 0
        for start, end in spans:
            part = slice(at, at + end - start)
            tokens = shard.tokens[start : end + 1]
            inputs[part], targets[part] = tokens[:-1], tokens[1:]
            if shard.loss_mask is not None:
                targets[part][shard.loss_mask[start + 1 : end + 1] == 0] = IGNORE_INDEX
            at = part.stop
        targets[: max(0, self.prefix_len - 1)] = IGNORE_INDEX
        if shard.loss_mask is None and shard.has_eos:
            targets[targets == shard.bos_id] = IGNORE_INDEX
        if self.stride < self.seq_len and spans[0][0] > 0:
            targets[: self.seq_len - self.stride] = IGNORE_INDEX
        return inputs, targets

    def batch(
        self, indices: Sequence[int] | np.ndarray, shifts: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of these windows, each (B, T) int64; see spans() for `shifts`, one per window."""
        shifts = [0] * len(indices) if shifts is None else shifts
        inputs, targets = zip(
            *(self.window(int(index), shift) for index, shift in zip(indices, shifts))
        )
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))

    def document_ids(self, inputs: Tensor) -> Tensor | None:
        """Number each token's document in its window, and each padding token, (B, T) int64; None without masking."""
        return (
            (inputs == self.tokens.shards[0].bos_id).cumsum(dim=1)
            if self.document_masking
            else None
        )


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
    count = len(dataset) if limit is None else min(limit, len(dataset))
    is_whole = dataset.packing == "best_fit" and count == len(dataset)
    if (
        not (dataset.packing == "documents" or is_whole)
        or dataset.prefix_len > 1
        or not knows_log_probs
    ):
        return None
    nats, targets = 0.0, 0
    all_starts = dataset.starts or [shard.offsets[-1:] for shard in dataset.tokens.shards]
    for shard, starts in zip(dataset.tokens.shards, all_starts):
        end = starts[min(count, len(starts) - 1)]
        offsets = shard.offsets[:]
        n_documents = int(np.searchsorted(offsets, end))
        if (np.diff(offsets[: n_documents + 1]) > dataset.seq_len).any():
            return None
        nats -= float(shard.log_probs[:n_documents].sum())
        targets += (
            int(end) - shard.has_eos * n_documents
        )  # the BOS token after an EOS token is not a target
        count -= min(count, len(starts) - 1)
    return nats / targets
