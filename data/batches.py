"""Windows of tokens: how a stream is cut, and their order in training, as a function of (seed, step)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import torch

from thinker.data.shards import Shard, TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

Packing = Literal["contiguous", "documents"]
ROUNDS = 8


def permute(index: int | np.ndarray, size: int, key: tuple[int, ...]) -> int | np.ndarray:
    """Where a permutation of range(size), chosen by key, sends an index (or each index of an array).

    A Feistel network over the smallest even number of bits that holds size - 1; what falls outside range(size) is sent
    on until it falls inside (cycle walking, less than 4 times on average). No table: any size costs the same.
    Raises IndexError for an index outside range(size), from which no walk would come back.
    """
    indices = np.atleast_1d(np.asarray(index, np.int64))
    if ((indices < 0) | (indices >= size)).any():
        raise IndexError(f"index {index} is outside range({size})")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.frombuffer(hashlib.sha512(repr((size, *key)).encode()).digest(), "<u8")[:ROUNDS]
    out = indices.astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = left << half | right
        outside = out >= size
    return out.astype(np.int64) if isinstance(index, np.ndarray) else int(out[0])


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of x reaches every bit of the result (products wrap at 64 bits)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class PackedDataset:
    """One way of cutting a TokenShards into windows of seq_len inputs and as many targets, the tokens one further.

    Every token but the first boundary of each shard is a target exactly once; nothing is dropped.

    "contiguous": windows follow each other through the stream; the last of a shard is padded.
    "documents": a window starts at a document's BOS token and holds as many whole documents as fit, in order; the
    rest is padding. A document longer than seq_len is cut into consecutive windows of its own.

    Padding: the input is the BOS token, the target IGNORE_INDEX (-1). Raises UserError for an unknown packing.

    Args:
        stride: "contiguous" windows begin so many tokens after each other and overlap: each counts its last `stride`
            targets, and the first of a shard all. seq_len unless given.
        isolate: the model shall see the documents of a window apart: see documents().
        given: the first so many tokens of a window are given; what they predict of each other is not counted.
    """

    def __init__(
        self,
        tokens: TokenShards,
        seq_len: int,
        packing: Packing,
        *,
        stride: int | None = None,
        document_masking: bool = False,
        prefix_len: int = 0,
    ) -> None:
        if packing not in get_args(Packing):
            raise UserError(f"data.packing={packing}: it must be {' or '.join(get_args(Packing))}")
        if seq_len < 1:
            raise UserError(f"data.seq_len={seq_len}: it must be at least 1")
        self.tokens = tokens
        self.seq_len = seq_len
        self.packing = packing
        self.document_masking, self.prefix_len = document_masking, prefix_len
        self.stride = seq_len if stride is None else stride
        if not 1 <= self.stride <= seq_len or (self.stride < seq_len and (packing == "documents" or prefix_len > 1)):
            raise UserError(
                f"a stride of {stride} tokens: it must lie between 1 and the context's length, {seq_len}, and goes "
                "with contiguous windows, of a model without a prefix"
            )
        if document_masking and any(shard.loss_mask is not None and _has_inner_bos(shard) for shard in tokens.shards):
            raise UserError(
                "data.document_masking: the chat template writes the BOS token within conversations too, so that "
                "it does not tell where one begins; set it to false"
            )
        self.starts: list[np.ndarray] = []  # "documents" only: see _packed_starts
        if packing == "documents":
            self.starts = [_packed_starts(shard, seq_len) for shard in tokens.shards]
            counts = [len(starts) - 1 for starts in self.starts]
        else:
            rest = [max(0, shard.n_tokens - 1 - seq_len) for shard in tokens.shards]  # targets after a first window
            counts = [1 + -(-more // self.stride) for more in rest]
        self._first = np.cumsum([0, *counts])  # number of the first window of each shard, and of all windows

    def __len__(self) -> int:
        return int(self._first[-1])

    def span(self, index: int) -> tuple[Shard, int, int]:
        """The shard that window `index` lies in, and the positions of its first input and of its last target."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        shard, local = self.tokens.shards[number], index - int(self._first[number])
        if self.packing == "documents":
            return shard, int(self.starts[number][local]), int(self.starts[number][local + 1])
        start = local * self.stride
        return shard, start, min(start + self.seq_len, shard.n_tokens - 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each (T,) int64."""
        shard, start, end = self.span(index)
        inputs = np.full(self.seq_len, shard.tokens[0], np.int64)
        targets = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        inputs[: end - start] = shard.tokens[start:end]
        targets[: end - start] = shard.tokens[start + 1 : end + 1]
        targets[: max(0, self.prefix_len - 1)] = IGNORE_INDEX
        if shard.loss_mask is not None:
            targets[: end - start][shard.loss_mask[start + 1 : end + 1] == 0] = IGNORE_INDEX
        elif shard.has_eos:
            targets[targets == int(shard.tokens[0])] = IGNORE_INDEX
        if start > 0:
            targets[: self.seq_len - self.stride] = IGNORE_INDEX
        return inputs, targets

    def batch(self, indices: list[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each (B, T) int64, of the windows asked for."""
        inputs, targets = zip(*(self[int(index)] for index in indices))
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))

    def document_ids(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Number the documents of each window where they are isolated, (B, T) -> (B, T). Padding is many short ones."""
        return (inputs == int(self.tokens.shards[0].tokens[0])).cumsum(dim=1) if self.document_masking else None

    @property
    def n_targets(self) -> int:
        """Targets counted in one pass over all windows."""
        return sum(
            shard.n_tokens - 1 - shard.has_eos * shard.n_documents
            if shard.loss_mask is None
            else int(shard.loss_mask[1:].sum())
            for shard in self.tokens.shards
        )

    @property
    def longest_document(self) -> int:
        """Positions that the longest document takes: its BOS token and its tokens."""
        return max(int(np.diff(shard.offsets).max()) for shard in self.tokens.shards)


class BatchLoader:
    """Batches for training, each a pure function of (seed, step): each window once an epoch, in a new order each time.

    Raises UserError where the corpus is shorter than one window.
    """

    def __init__(self, dataset: PackedDataset, batch_size: int, seed: int) -> None:
        if dataset.tokens.n_tokens < dataset.seq_len + 1:
            raise UserError(
                f"the training split has {dataset.tokens.n_tokens} tokens, but one window of data.seq_len="
                f"{dataset.seq_len} takes {dataset.seq_len + 1}; lower data.seq_len or add text"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed

    def sample_ids(self, step: int) -> list[int]:
        """The numbers of the batch_size windows of a step (from 0)."""
        size = len(self.dataset)
        epochs, indices = np.divmod(step * self.batch_size + np.arange(self.batch_size), size)
        ids = np.empty(self.batch_size, np.int64)
        for epoch in np.unique(epochs):
            ids[epochs == epoch] = permute(indices[epochs == epoch], size, (self.seed, int(epoch)))
        return ids.tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of a step, each (batch_size, T) int64; rows: only these, for a rank or micro-batch."""
        return self.dataset.batch(self.sample_ids(step)[rows])


def sequential_batches(
    dataset: PackedDataset, batch_size: int, limit: int | None = None, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `limit` windows (all, where None) in order, in batches of (inputs, targets); the last may be short.

    Of several ranks each takes every so many-th batch, all equally many: one that would have none left gets a window
    in which no target is counted.
    """
    count = _count(dataset, limit)
    for start in range(0, count, batch_size * ranks):
        own = start + rank * batch_size
        inputs, targets = dataset.batch(np.arange(own, min(own + batch_size, count)) if own < count else [0])
        yield inputs, targets if own < count else torch.full_like(targets, IGNORE_INDEX)


def entropy_floor(dataset: PackedDataset, limit: int | None = None) -> float | None:
    """-sum ln P / sum (tokens + 1) over the documents in the first `limit` windows, in nats a target.

    It is the least that the loss over exactly these windows can be on average, each document seen from its beginning.
    None where the corpus does not know ln P, where a document was cut or begins given, and for contiguous packing,
    which cuts them.
    """
    if (
        dataset.packing != "documents"
        or dataset.prefix_len > 1
        or any(shard.log_probs is None for shard in dataset.tokens.shards)
    ):
        return None
    nats, targets, count = 0.0, 0, _count(dataset, limit)
    for shard, starts in zip(dataset.tokens.shards, dataset.starts):
        end = starts[min(count, len(starts) - 1)]
        n_documents = int(np.searchsorted(shard.offsets, end))
        lengths = np.diff(shard.offsets[: n_documents + 1])
        if (lengths > dataset.seq_len).any():
            return None
        nats -= float(shard.log_probs[:n_documents].sum())
        targets += int(end) - shard.has_eos * n_documents  # the boundary behind such an end is none
        count -= min(count, len(starts) - 1)
    return nats / targets


def _has_inner_bos(shard: Shard) -> bool:
    return int((shard.tokens == shard.tokens[0]).sum()) > len(shard.offsets)


def _packed_starts(shard: Shard, seq_len: int) -> np.ndarray:
    """(n_windows + 1,) int64: where each window of "documents" packing starts, which is where the one before ends.

    It lies beside the shard as a memory-mapped file, made at first use: memory does not grow with the corpus.
    """
    path = shard.path.with_suffix(f".windows-{seq_len}.npy")
    try:
        starts = np.load(path, mmap_mode="r", allow_pickle=False)
        if starts.dtype == np.int64 and starts.ndim == 1 and starts[0] == 0 and starts[-1] == shard.n_tokens - 1:
            return starts
    except (OSError, ValueError, EOFError, IndexError):
        pass  # not made yet, or damaged: it takes a moment to make
    offsets = shard.offsets
    fitting = np.searchsorted(offsets, offsets[:-1] + seq_len, side="right") - 1
    following = np.maximum(fitting, np.arange(1, len(offsets)))  # a document too long for a window goes alone
    firsts, document, jumps = [], 0, following.tolist()
    while document < shard.n_documents:
        firsts.append(document)
        document = jumps[document]
    begin, end = offsets[firsts], offsets[following[firsts]]
    pieces = -(-(end - begin) // seq_len)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a window among its pieces
    starts = np.append(np.repeat(begin, pieces) + number * seq_len, offsets[-1])
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        np.save(file, starts, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _count(dataset: PackedDataset, limit: int | None) -> int:
    return len(dataset) if limit is None else min(limit, len(dataset))
