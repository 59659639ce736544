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

# What is summed over pairs. Nats, tokens and bytes are those of chosen answers.
SUMS = (
    "loss",
    "right",
    "margin",
    "pairs",
    "nats",
    "tokens",
    "bytes",
    "rejected_nats",
    "rejected_tokens",
)


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
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
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
        totals = [math.fsum(values) for values in zip(*gathered)]
        return self._evaluation(dict(zip(SUMS, totals)))

    def _sums(self, model: Thinker, indices: list[int], reference: np.ndarray) -> Tensor:
        """The SUMS of some windows, float64 on the host."""
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
        sums = {
            "loss": compared.loss.sum(),
            "right": is_right(compared.margin).sum(),
            "margin": compared.margin.sum(),
            "pairs": log_probs.new_tensor(len(pairs.numbers)),
            "nats": -log_probs[:, 0].sum(),
            "tokens": n_tokens[:, 0].sum(),
            "bytes": log_probs.new_tensor(n_bytes),
            "rejected_nats": -log_probs[:, 1].sum(),
            "rejected_tokens": n_tokens[:, 1].sum(),
        }
        return torch.stack([sums[name] for name in SUMS]).double().cpu()

    def _evaluation(self, sums: dict[str, float]) -> Evaluation:
        n_pairs = sums["pairs"]
        nats, n_tokens, n_bytes = sums["nats"], sums["tokens"], sums["bytes"]
        metrics = {
            "val_dpo_loss": sums["loss"] / n_pairs,
            "val_dpo_accuracy": sums["right"] / n_pairs,
            "val_dpo_margin": sums["margin"] / n_pairs,
            "val_rejected_loss": sums["rejected_nats"] / sums["rejected_tokens"],
        }
        return Evaluation(
            loss=nats / n_tokens,
            bits_per_byte=nats / math.log(2) / max(n_bytes, 1),
            entropy_floor=None,
            n_tokens=int(n_tokens),
            n_bytes=n_bytes,
            metrics=metrics,
        )
