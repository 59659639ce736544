"""Windows of whole pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinker.data.batches.best_fit import pack_best_fit
from thinker.data.batches.windows import LostTargets, PackedDataset
from thinker.data.corpus.shards import Shard, TokenShards
from thinker.runtime.errors import UserError

PADDING = -1


@dataclass(frozen=True)
class PairTable:
    """The pairs of a shard, in the order of their tokens.

    bounds: (n + 1,) where they begin, and the end. middles: (n,) where their rejected rows begin.
    chosen_targets: (n,) the numbers of targets of their chosen rows. first_number: of the first
    pair.
    """

    bounds: np.ndarray
    middles: np.ndarray
    chosen_targets: np.ndarray
    first_number: int


class PairWindows(PackedDataset):
    """Windows of seq_len tokens with whole pairs, and padding behind them.

    The rows of a pair, chosen and rejected, are neighbours in a shard. Pairs are numbered over all
    shards. `n_left_out` pairs are longer than a window and in none. Raises UserError if all are.
    """

    def __init__(self, tokens: TokenShards, seq_len: int, split: str = "training") -> None:
        self.n_left_out = 0
        self.n_pairs = 0
        self._tables: dict[int, PairTable] = {}  # by the number of the shard
        super().__init__(tokens, seq_len, "best_fit")
        if len(self) == 0:
            raise UserError(
                f"all {self.n_left_out:,} pairs for {split} are longer than data.seq_len={seq_len} "
                "tokens; raise it"
            )

    def _pack_shard(self, number: int, shard: Shard) -> int:
        offsets = shard.offsets[:]
        assert shard.loss_mask is not None, "a corpus of pairs has targets"
        assert len(offsets) % 2 == 1, "pairs have two rows"
        bounds = offsets[::2]
        middles = offsets[1::2]
        # A row's targets are one position later.
        n_until = np.append(0, np.cumsum(shard.loss_mask[:], dtype=np.int64))
        chosen_targets = n_until[middles + 1] - n_until[bounds[:-1] + 1]
        self._tables[number] = PairTable(bounds, middles, chosen_targets, self.n_pairs)
        self.n_pairs += len(middles)

        is_too_long = np.diff(bounds) > self.seq_len  # by pair
        self.n_left_out += int(is_too_long.sum())
        segments, first_segments = pack_best_fit(bounds, self.seq_len, truncate=True)
        pair_of_segment = np.searchsorted(bounds, segments[:, 0])
        is_kept = ~is_too_long[pair_of_segment]  # by segment
        # A pair that is cut has a window of its own, so the first segment decides for its window.
        is_window_kept = is_kept[first_segments[:-1]]
        pairs_per_window = np.diff(first_segments)[is_window_kept]
        first_pairs = np.append(0, np.cumsum(pairs_per_window))
        self.segments[number] = (segments[is_kept].reshape(-1), first_pairs)
        return len(pairs_per_window)

    def pairs(self, index: int) -> list[int]:
        """The numbers of the pairs in a window, in the order of their tokens."""
        table, places, _ = self._places(index)
        return (places + table.first_number).tolist()

    def n_chosen(self, index: int) -> int:
        """The number of targets of the chosen answers in a window."""
        table, places, _ = self._places(index)
        return int(table.chosen_targets[places].sum())

    def sides(self, index: int) -> np.ndarray:
        """(T,) int64: for each token of a window 2k if it belongs to the chosen row of its k-th
        pair, 2k + 1 for the rejected row, PADDING behind the last."""
        table, places, spans = self._places(index)
        sides = np.full(self.seq_len, PADDING, np.int64)
        at = 0
        for k, (start, end) in enumerate(spans):
            middle = at + int(table.middles[places[k]]) - start
            stop = at + end - start
            sides[at:middle] = 2 * k
            sides[middle:stop] = 2 * k + 1
            at = stop
        return sides

    def lost_targets(self, limit: int | None = None) -> LostTargets:
        """No pair is cut; those that are left out are told apart."""
        return LostTargets(0, 0, 1)

    def _places(self, index: int) -> tuple[PairTable, np.ndarray, list[tuple[int, int]]]:
        """The pairs of a window: the table of their shard, their places in it, and their spans."""
        _, spans = self.spans(index)
        number = int(np.searchsorted(self._first_window, index, side="right")) - 1
        table = self._tables[number]
        starts = [start for start, _ in spans]
        return table, np.searchsorted(table.bounds, starts), spans
