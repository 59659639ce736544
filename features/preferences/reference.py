"""The log-probabilities of all answers by the model that training starts from, kept in a file."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from thinker.evaluation.loss import PROGRESS_DELAY
from thinker.features.preferences.pair_log_probs import all_log_probs
from thinker.features.preferences.pair_windows import PairWindows
from thinker.model import Thinker
from thinker.runtime.errors import RunError
from thinker.runtime.files import atomic_write
from thinker.runtime.process.progress import Progress
from thinker.runtime.ranks import DistContext

FILE = "reference.npy"  # in the run directory


class Reference:
    """ln P of the answers of all pairs by the initial model, (n, 2) float64 for each split; NaN for
    pairs that are in no window.

    `digest`: the sha256 of the file, which the run's checkpoints keep.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.digest = ""
        self.train = np.zeros((0, 2))
        self.val = np.zeros((0, 2))

    def compute(
        self,
        model: Thinker,
        train: PairWindows,
        val: PairWindows,
        batch_size: int,
        dist: DistContext,
    ) -> None:
        """Let the model read all pairs, and write the file. Ranks share the pairs."""
        total = len(train) + len(val)
        with Progress(
            desc="reference", total=total, leave=False, delay=PROGRESS_DELAY,
            disable=not dist.is_main,
        ) as bar:  # fmt: skip
            self.train = all_log_probs(model, train, batch_size, dist, bar.update)
            self.val = all_log_probs(model, val, batch_size, dist, bar.update)
        file = io.BytesIO()
        np.save(file, np.concatenate([self.train, self.val]))
        self.digest = hashlib.sha256(file.getvalue()).hexdigest()
        if dist.is_main:
            atomic_write(self.path, file.getvalue())

    def read(self, n_train: int, digest: str) -> None:
        """Read the file. Raises RunError if it is missing, or not the one of `digest`."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            reason = f"{self.path}: {error.strerror}"
            raise RunError(f"{reason}; restore it to resume the run") from error
        self.digest = hashlib.sha256(content).hexdigest()
        if self.digest != digest:
            raise RunError(f"{self.path} has changed since the run started; restore it")
        both = np.load(io.BytesIO(content), allow_pickle=False)
        self.train = both[:n_train]
        self.val = both[n_train:]
