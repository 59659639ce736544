"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

A reward model r is usually trained with the loss of Bradley and Terry, -ln sigmoid(r(chosen) -
r(rejected)). The policy that is best for r, held to a reference by a KL divergence, has beta ·
ln(policy / reference) = r + a constant of the prompt. So that log-ratio can stand for r in the
loss, and the policy is trained without a reward model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.features.preferences.keys import DPOConfig
from thinker.features.preferences.pair_dataset import PairDataset
from thinker.features.preferences.pair_log_probs import (
    PairBatch,
    count_targets,
    pair_batch,
    pair_log_probs,
)
from thinker.features.preferences.pair_windows import PairWindows
from thinker.features.preferences.reference import Reference
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.callback import Callback, TrainingRun
from thinker.training.kernels import cached_weight_casts, fused_kernels
from thinker.training.objective import Loss


class PairLosses(NamedTuple):
    """Of P pairs, (P,) fp32 each."""

    loss: Tensor  # nats
    margin: Tensor  # the reward of the chosen answer less that of the rejected one
    chosen_reward: Tensor
    rejected_reward: Tensor


def dpo_loss(log_probs: Tensor, reference: Tensor, beta: float) -> PairLosses:
    """The loss of pairs, from ln P of (chosen, rejected) by the policy and the reference: (P, 2)
    each."""
    rewards = beta * (log_probs - reference)  # (P, 2)
    chosen, rejected = rewards.unbind(1)
    margin = chosen - rejected
    return PairLosses(-F.logsigmoid(margin), margin, chosen, rejected)


class BatchCounts(NamedTuple):
    """What all ranks have in the batch of a step."""

    pairs: int
    chosen_tokens: int


class DPOLoss(Callback):
    """The mean of dpo_loss() over the pairs of a batch: an objective of training.

    `train_loss` in the log is the cross-entropy of the chosen answers in nats per token.
    """

    def __init__(self, options: DPOConfig) -> None:
        self.options = options
        self.run: TrainingRun | None = None
        self.windows: PairWindows | None = None
        self.reference: Reference | None = None
        self.digest = ""
        self.accuracy = ""  # of the newest step that was logged
        self._counted_step = -1
        self._counts = BatchCounts(0, 0)

    def on_start(self, run: TrainingRun) -> None:
        """Compute or read the reference's log-probabilities."""
        self.run = run
        parts = run.parts
        dataset: PairDataset = run.loader.dataset
        self.windows = dataset.windows
        self.reference = Reference(run.directory.path)
        dataset.reference = self.reference
        if run.state.step > 0:
            self.reference.read(self.windows.n_pairs, self.digest)
            return
        val = PairWindows(run.corpus.val, parts.settings.data.seq_len, "validation")
        batch_size = parts.settings.train.micro_batch_size
        with cached_weight_casts(parts.model), fused_kernels(parts.model, parts.kernels):
            self.reference.compute(parts.model, self.windows, val, batch_size, parts.dist)
        self.digest = self.reference.digest

    def on_log(self, line: Mapping[str, Any]) -> None:
        """Keep what the progress bar shows."""
        if "dpo_accuracy" in line:
            self.accuracy = f"right order {line['dpo_accuracy']:.1%}"

    def progress_text(self) -> str:
        """The share of pairs whose chosen answer has the higher reward."""
        return self.accuracy

    def state_dict(self) -> dict[str, Any]:
        """Which reference the run has."""
        return {"dpo_reference": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the reference of the run that resumes."""
        self.digest = state["dpo_reference"]

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Compare the answers of the pairs in a micro-batch."""
        pairs, reference, counts = self._pairs(batch)
        log_probs = pair_log_probs(model, batch.inputs, batch.targets, pairs, batch.target_losses)
        n_tokens = count_targets(batch.targets, pairs)
        compared = self.compare(log_probs, reference, n_tokens)
        # The step divides by the targets of the whole batch. But the loss is a mean over its pairs,
        # and train_loss one over the tokens of its chosen answers.
        loss = compared.loss.sum() * (batch.n_targets / counts.pairs)
        with torch.no_grad():  # what the log says
            n_pairs = log_probs.new_tensor(len(pairs.numbers))
            n_chosen, n_rejected = n_tokens.sum(0)
            parts = {
                "dpo_loss": (compared.loss.sum(), n_pairs),
                "dpo_accuracy": (is_right(compared.margin).sum(), n_pairs),
                "dpo_margin": (compared.margin.sum(), n_pairs),
                "chosen_reward": (compared.chosen_reward.sum(), n_pairs),
                "rejected_reward": (compared.rejected_reward.sum(), n_pairs),
                "rejected_loss": (-log_probs[:, 1].sum(), n_rejected),
                "chosen_tokens": (n_chosen, n_pairs),
                "rejected_tokens": (n_rejected, n_pairs),
            }
            nats = -log_probs[:, 0].sum() * (batch.n_targets / counts.chosen_tokens)
        n_targets = (batch.targets != IGNORE_INDEX).sum()
        return Loss(loss, n_targets, parts, nats)

    def compare(self, log_probs: Tensor, reference: Tensor, n_tokens: Tensor) -> PairLosses:
        """The losses of pairs; a subclass may compare them in another way.

        log_probs, reference: ln P of (chosen, rejected), (P, 2) each. n_tokens: of these answers,
        (P, 2).
        """
        return dpo_loss(log_probs, reference, self.options.beta)

    def _pairs(self, batch: Batch) -> tuple[PairBatch, Tensor, BatchCounts]:
        """The pairs of a micro-batch, ln P by the reference (P, 2), and counts of the whole
        batch."""
        device = batch.inputs.device
        if self.run is None:  # random tokens, to measure the time of a step
            zeros = torch.zeros(len(batch.inputs), 2, device=device)
            counts = BatchCounts(len(batch.inputs), batch.n_targets)
            return half_and_half(batch.inputs), zeros, counts
        pairs = pair_batch(self.windows, batch.windows.tolist(), device)
        reference = torch.from_numpy(self.reference.train[pairs.numbers]).float().to(device)
        return pairs, reference, self._batch_counts(self.run.state.step)

    def _batch_counts(self, step: int) -> BatchCounts:
        """The counts of the whole batch of a step, which all micro-batches need."""
        if self._counted_step != step:
            indices = self.run.loader.sample_ids(step)  # of all ranks
            n_pairs = sum(len(self.windows.pairs(index)) for index in indices)
            n_chosen = sum(self.windows.n_chosen(index) for index in indices)
            self._counts = BatchCounts(n_pairs, n_chosen)
            self._counted_step = step
        return self._counts


def is_right(margin: Tensor) -> Tensor:
    """1 where the chosen answer has the higher reward; a tie counts as half."""
    return (margin > 0).float() + 0.5 * (margin == 0)


def half_and_half(inputs: Tensor) -> PairBatch:
    """One pair in each row of tokens (B, T), of two halves."""
    n_rows, length = inputs.shape
    position = torch.arange(length, device=inputs.device)
    is_second = (position >= length // 2).long()  # (T,)
    first = 2 * torch.arange(n_rows, device=inputs.device)  # (B,)
    return PairBatch(list(range(n_rows)), first[:, None] + is_second)
