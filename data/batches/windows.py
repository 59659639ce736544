"""Windows of tokens: a split of a corpus cut into sequences, packed in one of three ways."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.packing import Table, best_fit_segments, document_starts
from thinker.data.corpus.shards import Shard, TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError

Packing = Literal["contiguous", "documents", "best_fit"]


class LostTargets(NamedTuple):
    """Targets of conversations that are not trained, and how many there are in all."""

    n_cut: int  # behind the window in which their conversation starts
    n_in_prefix: int  # in the bidirectional prefix of a window
    n_targets: int  # with the others

    def lines(self, limit: str, prefix_len: int) -> list[str]:
        """What a user should know. limit: the name and value of the length of windows."""
        lines = []
        if self.n_cut:
            lines.append(f"conversations are cut at {limit}: {self._share(self.n_cut)} are lost")
        if self.n_in_prefix:
            lines.append(
                f"{self._share(self.n_in_prefix)} are lost in the bidirectional prefix of "
                f"{prefix_len} tokens"
            )
        return lines

    def _share(self, n: int) -> str:
        return f"{n:,} of {self.n_targets:,} targets ({n / self.n_targets:.1%})"


class PackedDataset:
    """Token shards split into windows of seq_len inputs and targets; targets are the tokens one
    position later.

    Every token of a text except the first BOS token of each shard is a target exactly once. Padding
    has BOS as input and IGNORE_INDEX as target.

    "contiguous": consecutive windows of the stream; the last window of a shard is padded.
    "documents": a window starts at a document's BOS token and contains as many complete documents
    as fit, in order, followed by padding. A document longer than seq_len is split into consecutive
    windows. "best_fit": windows contain complete documents in any order, chosen so that there is
    little padding. Of a document longer than seq_len, the last piece shares its window with other
    documents.

    A conversation is never continued in another window, where its answers would be trained without
    their questions: "contiguous" means "documents", and what does not fit into a window is left out
    (lost_targets). With a stride below seq_len, which is for evaluation, it is continued.

    Args:
        stride: contiguous windows start this many tokens apart (default: seq_len). If they overlap,
            only the last `stride` targets of a window are counted, except in the first window of a
            shard.
        document_masking: number the documents of a window, so that the model can mask across them
            (document_ids).
        prefix_len: the first tokens of each window are context only, without targets among
            themselves.
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
            raise UserError(f"data.packing={packing}: choose from {', '.join(get_args(Packing))}")
        self.tokens = tokens
        self.seq_len = seq_len
        self.packing = packing
        self.document_masking = document_masking
        self.prefix_len = prefix_len
        self.stride = seq_len if stride is None else stride
        self._check_stride()
        if document_masking:
            _check_documents_begin_with_bos(tokens)
        # Of the windows of a shard, by its number.
        self.starts: dict[int, Table] = {}  # "documents" only
        self.segments: dict[int, tuple[Table, Table]] = {}  # "best_fit" only
        counts = self._pack()
        # (n_shards + 1,): the first window of each shard, and the end
        self._first_window = np.cumsum([0, *counts])

    def _check_stride(self) -> None:
        can_overlap = self.packing == "contiguous" and self.prefix_len <= 1
        is_in_range = 1 <= self.stride <= self.seq_len
        if not is_in_range or (self.stride < self.seq_len and not can_overlap):
            size = self.seq_len
            only = f", or exactly {size} with packed documents or a bidirectional prefix"
            raise UserError(
                f"the stride is {self.stride} tokens; use 1 to the context length, {size}{only}"
            )

    def _pack(self) -> list[int]:
        """Lay out the windows. Returns how many each shard has."""
        return [self._pack_shard(number, shard) for number, shard in enumerate(self.tokens.shards)]

    def _pack_shard(self, number: int, shard: Shard) -> int:
        packing = self._packing_of(shard)
        if packing == "documents":
            self.starts[number] = document_starts(shard, self.seq_len, _is_chat(shard))
            return len(self.starts[number]) - 1
        if packing == "best_fit":
            self.segments[number] = best_fit_segments(shard, self.seq_len, _is_chat(shard))
            return len(self.segments[number][1]) - 1
        n_after_first = max(0, shard.n_tokens - 1 - self.seq_len)  # targets
        return 1 + -(-n_after_first // self.stride)

    def _packing_of(self, shard: Shard) -> Packing:
        """How the windows of a shard are laid out."""
        overlaps = self.stride < self.seq_len
        if self.packing == "contiguous" and _is_chat(shard) and not overlaps:
            return "documents"
        return self.packing

    def __len__(self) -> int:
        return int(self._first_window[-1])

    def spans(self, index: int, shift: int = 0) -> tuple[Shard, list[tuple[int, int]]]:
        """The shard that contains window `index`, and the positions of the first input and last
        target of its parts.

        `shift`: contiguous windows start this many tokens later, up to seq_len - 1; the last one of
        a shard ends with the shard. The first `shift` targets of a shard are then in no window.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window index {index} is outside range({len(self)})")
        number = int(np.searchsorted(self._first_window, index, side="right")) - 1
        shard = self.tokens.shards[number]
        local = index - int(self._first_window[number])  # the window's index in its shard
        if number in self.starts:
            start, next_start = self.starts[number][local : local + 2].tolist()
            return shard, [(start, min(next_start, start + self.seq_len))]
        if number in self.segments:
            segments, firsts = self.segments[number]
            first, after = firsts[local : local + 2].tolist()
            pairs = segments[2 * first : 2 * after].reshape(-1, 2).tolist()
            return shard, [(start, end) for start, end in pairs]
        last = shard.n_tokens - 1
        start = local * self.stride
        if shift:
            start = min(start + shift, max(0, last - self.seq_len))
        return shard, [(start, min(start + self.seq_len, last))]

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
            inputs[part] = tokens[:-1]
            targets[part] = tokens[1:]
            if shard.loss_mask is not None:
                targets[part][shard.loss_mask[start + 1 : end + 1] == 0] = IGNORE_INDEX
            at = part.stop
        targets[: max(0, self.prefix_len - 1)] = IGNORE_INDEX
        if shard.loss_mask is None and shard.has_eos:
            targets[targets == shard.bos_id] = IGNORE_INDEX
        if self.stride < self.seq_len and spans[0][0] > 0:
            # These targets count in the window before, which overlaps.
            targets[: self.seq_len - self.stride] = IGNORE_INDEX
        return inputs, targets

    def lost_targets(self, limit: int | None = None) -> LostTargets:
        """The targets of conversations that no window counts.

        limit: of the conversations in the first windows only.
        """
        n_left = len(self)
        if limit is not None:
            n_left = min(limit, n_left)
        n_cut = n_in_prefix = n_targets = 0
        for number, shard in enumerate(self.tokens.shards):
            n_windows = min(n_left, int(np.diff(self._first_window)[number]))
            n_left -= n_windows
            if n_windows == 0 or not _is_chat(shard):
                continue
            n_until = np.cumsum(shard.loss_mask[:], dtype=np.int64)  # targets up to each token
            if self.stride < self.seq_len:  # the next window goes on with what does not fit
                last = min((n_windows - 1) * self.stride + self.seq_len, shard.n_tokens - 1)
                n_targets += n_until[last] - n_until[0]
                continue
            starts, ends, n_before = self._segments(number, n_windows)
            offsets = shard.offsets[:]
            document_ends = offsets[np.searchsorted(offsets, ends)]
            in_prefix = np.maximum(0, self.prefix_len - 1 - n_before)
            trained_from = np.minimum(starts + in_prefix, ends)
            n_cut += (n_until[document_ends] - n_until[ends]).sum()
            n_in_prefix += (n_until[trained_from] - n_until[starts]).sum()
            n_targets += (n_until[document_ends] - n_until[starts]).sum()
        return LostTargets(int(n_cut), int(n_in_prefix), int(n_targets))

    def _segments(
        self, number: int, n_windows: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
        """The parts of the first windows of a shard that is packed: the position of the first
        input, of the last target, and the number of tokens before them in their window."""
        if number in self.starts:
            table = self.starts[number][: n_windows + 1]
            return table[:-1], np.minimum(table[1:], table[:-1] + self.seq_len), 0
        segments, firsts = self.segments[number]
        first = firsts[: n_windows + 1]
        starts, ends = segments[: 2 * int(first[-1])].reshape(-1, 2).T
        lengths = ends - starts
        n_before = np.cumsum(lengths) - lengths
        return starts, ends, n_before - np.repeat(n_before[first[:-1]], np.diff(first))

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of these windows, each (B, T) int64."""
        windows = [self.window(int(index)) for index in indices]
        inputs = np.stack([window[0] for window in windows])
        targets = np.stack([window[1] for window in windows])
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def document_ids(self, inputs: Tensor) -> Tensor | None:
        """Number each token's document in its window, and each padding token, (B, T) int64; None
        without masking."""
        if not self.document_masking:
            return None
        return number_documents(inputs, self.tokens.shards[0].bos_id)


def _is_chat(shard: Shard) -> bool:
    return shard.loss_mask is not None


def number_documents(inputs: Tensor, bos_id: int) -> Tensor:
    """Number each token's document in its window, and each padding token: (B, T) int64 -> (B, T)
    int64."""
    return (inputs == bos_id).cumsum(dim=1)


def _check_documents_begin_with_bos(tokens: TokenShards) -> None:
    """Raise UserError if BOS tokens do not separate the documents, as in some conversations."""
    for shard in tokens.shards:
        if shard.loss_mask is None:
            continue
        n_bos = (shard.tokens[:] == shard.bos_id).sum()
        if n_bos > len(shard.offsets):
            reason = "the chat template also writes the BOS token inside conversations"
            effect = "conversations cannot be separated"
            raise UserError(f"data.document_masking=true: {reason}, so {effect}; set it to false")


def check_fills_a_window(tokens: TokenShards, seq_len: int) -> None:
    """Raise UserError if the training split is shorter than a window. Conversations are padded."""
    n_tokens = tokens.n_tokens
    if n_tokens <= seq_len and not tokens.has_conversations:
        needs = f"data.seq_len={seq_len} needs {seq_len + 1}; lower data.seq_len or add text"
        raise UserError(f"the training split has {n_tokens} tokens, but {needs}")


def sequential_batches(
    dataset: PackedDataset, batch_size: int, limit: int | None = None, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first `limit` windows (None: all) in order as (inputs, targets); the last batch may
    be smaller.

    Ranks take turns. A rank without a batch in the last round gets a window whose targets are all
    IGNORE_INDEX.
    """
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for round_start in range(0, count, batch_size * ranks):
        start = round_start + rank * batch_size
        if start < count:
            yield dataset.batch(range(start, min(start + batch_size, count)))
        else:
            inputs, targets = dataset.batch([0])
            yield inputs, torch.full_like(targets, IGNORE_INDEX)
