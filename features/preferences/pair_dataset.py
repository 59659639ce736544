"""The training windows of a run that learns from pairs."""

from __future__ import annotations

from thinker.data.batches.dataset import ShuffledDataset
from thinker.features.preferences.pair_windows import PairWindows
from thinker.features.preferences.reference import Reference


class PairDataset(ShuffledDataset):
    """Windows of pairs in a new order in each epoch. `reference` is there once training starts."""

    def __init__(self, windows: PairWindows, seed: int) -> None:
        super().__init__(windows, seed)
        self.windows = windows
        self.reference: Reference | None = None
