"""The loss on a set of windows, per token and per byte, beside the best that is possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from thinker.data.batches import PackedDataset, entropy_floor, sequential_batches
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext


@dataclass(frozen=True)
class Evaluation:
    """What was measured: nats a token, bits a byte of text, and the corpus's own entropy (nats a token) if known."""

    loss: float
    bits_per_byte: float
    entropy_floor: float | None
    n_tokens: int


class Evaluator:
    """A fixed part of the validation set, the same at every call; each of several ranks takes its share of it."""

    def __init__(
        self,
        windows: PackedDataset,
        batch_size: int,
        byte_lengths: np.ndarray,
        limit: int | None = None,
        dist: DistContext = SINGLE_PROCESS,
    ) -> None:
        self.windows, self.batch_size, self.limit, self.dist = windows, batch_size, limit, dist
        self.byte_lengths = torch.from_numpy(byte_lengths.astype(np.int64))
        self.floor = entropy_floor(windows, limit)

    @torch.no_grad()
    def __call__(self, model: Thinker, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Loss of `model` in evaluation mode; the mode it was in is put back.

        `stop` is asked before each batch, by all ranks alike; once it says yes, there is no result.
        """
        was_training = model.training
        model.eval()
        nats = torch.zeros((), dtype=torch.float64)
        if model.device.type in ("cpu", "cuda"):
            nats = nats.to(model.device)  # summed where the model is: the host asks once, at the end
        count = n_bytes = 0
        for inputs, targets in sequential_batches(
            self.windows, self.batch_size, self.limit, self.dist.rank, self.dist.world_size
        ):
            if stop():
                model.train(was_training)
                return None
            counted = targets[targets != IGNORE_INDEX]
            count += counted.numel()
            n_bytes += int(self.byte_lengths[counted].sum())
            given = (inputs, targets, self.windows.document_ids(inputs))
            given = [x if x is None else x.to(model.device, non_blocking=True) for x in given]
            loss, _ = model(given[0], targets=given[1], document_ids=given[2])
            nats += loss.to(nats.device, nats.dtype)
        model.train(was_training)
        said = zip(*self.dist.all_gather_scalars(nats.item(), count, n_bytes))
        total, count, n_bytes = math.fsum(next(said)), *(int(sum(each)) for each in said)
        if not count:
            raise UserError("nothing in the validation set is to be predicted; its texts are shorter than the prefix")
        return Evaluation(total / count, total / math.log(2) / max(n_bytes, 1), self.floor, count)
