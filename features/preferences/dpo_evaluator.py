"""Validation of a run that learns from pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinker.evaluation.loss import PROGRESS_DELAY, Evaluation
from thinker.features.preferences.dpo import dpo_loss, is_right
from thinker.features.preferences.pair_dataset import PairDataset
from thinker.features.preferences.pair_log_probs import (
    count_targets,
    pair_batch,
    pair_log_probs,
    shared_indices,
)
from thinker.features.preferences.pair_windows import PADDING, PairWindows
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import to_device
from thinker.runtime.process.progress import Progress
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext

# What is summed: the losses of pairs, those with the right order, their margins, the pairs; nats,
# tokens and bytes of the chosen answers; nats and tokens of the rejected ones.
N_SUMS = 9


@dataclass
class PreferenceEvaluator:
    """Compare the pairs in the first `limit` windows of the validation split; several processes
    share the work.

    `val_loss` is the cross-entropy of the chosen answers in nats per token, as train_loss is.

    dataset: has the reference once training starts. byte_lengths: of the tokens, by id.
    """

    windows: PairWindows
    batch_size: int
    beta: float
    dataset: PairDataset
    byte_lengths: np.ndarray
    limit: int | None = None
    dist: DistContext = field(default_factory=lambda: SINGLE_PROCESS)

    @torch.no_grad()
    def __call__(
        self, model: Thinker, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Compute the losses of `model`; None if stop(), called after each batch, returns True."""
        n_windows = min(self.limit or len(self.windows), len(self.windows))
        batches = list(shared_indices(n_windows, self.batch_size, self.dist))
        was_training = model.training
        model.eval()
        sums = torch.zeros(N_SUMS, dtype=torch.float64)
        try:
            for indices, is_own in Progress(
                batches, desc="evaluating", leave=False, delay=PROGRESS_DELAY,
                disable=not self.dist.is_main,
            ):  # fmt: skip
                found = self._sums(model, indices, self.dataset.reference.val)
                if is_own:
                    sums += found
                if stop():
                    return None
        finally:
            model.train(was_training)
        gathered = self.dist.all_gather_scalars(*sums.tolist())
        return self._evaluation([math.fsum(values) for values in zip(*gathered)])

    def _sums(self, model: Thinker, indices: list[int], reference: np.ndarray) -> Tensor:
        """(N_SUMS,) float64 on the host, of some windows."""
        inputs, targets = self.windows.batch(indices)
        pairs = pair_batch(self.windows, indices, model.device)
        on_device = to_device(targets, model.device)
        log_probs = pair_log_probs(model, to_device(inputs, model.device), on_device, pairs)
        of_reference = torch.from_numpy(reference[pairs.numbers]).to(log_probs)
        compared = dpo_loss(log_probs, of_reference, self.beta)
        n_tokens = count_targets(on_device, pairs)
        sides = pairs.sides.cpu()
        is_chosen = (sides != PADDING) & (sides % 2 == 0)
        counted = targets[is_chosen & (targets != IGNORE_INDEX)]
        n_bytes = float(self.byte_lengths[counted.numpy()].sum())
        values = [
            compared.loss.sum(),
            is_right(compared.margin).sum(),
            compared.margin.sum(),
            log_probs.new_tensor(len(pairs.numbers)),
            -log_probs[:, 0].sum(),
            n_tokens[:, 0].sum(),
            log_probs.new_tensor(n_bytes),
            -log_probs[:, 1].sum(),
            n_tokens[:, 1].sum(),
        ]
        return torch.stack(values).double().cpu()

    def _evaluation(self, sums: list[float]) -> Evaluation:
        loss, right, margin, n_pairs, nats, n_tokens, n_bytes, rejected_nats, n_rejected = sums
        metrics = {
            "val_dpo_loss": loss / n_pairs,
            "val_dpo_accuracy": right / n_pairs,
            "val_dpo_margin": margin / n_pairs,
            "val_rejected_loss": rejected_nats / n_rejected,
        }
        return Evaluation(
            loss=nats / n_tokens,
            bits_per_byte=nats / math.log(2) / max(n_bytes, 1),
            entropy_floor=None,
            n_tokens=int(n_tokens),
            n_bytes=n_bytes,
            metrics=metrics,
        )
