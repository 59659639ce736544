"""Gradual pruning during training (Zhu & Gupta 2017, arXiv:1710.01878): more and more weights
become zero.

What is pruned follows from the weights alone: a weight that is zero before an optimizer step is
zero after it. So checkpoints need no masks, and a model that is already pruned keeps its zeros.
"""

from typing import Any

import torch
from torch import Tensor

from thinker.data.batches.prefetch import Batch
from thinker.features.pruning.keys import EVERY, PruneConfig
from thinker.features.pruning.model_checks import check_prunable, check_shares
from thinker.features.pruning.saliency import score_parts
from thinker.features.pruning.weight_pruning import (
    block_matrices,
    score_weights,
    zero_share,
    zero_weights,
)
from thinker.features.pruning.zeros import (
    lowest,
    set_groups_to_zero,
    set_neurons_to_zero,
    zero_groups,
    zero_neurons,
)
from thinker.training.callback import Callback, StepInfo, TrainingParts, find_callback
from thinker.training.callbacks.weight_average import WeightAverage
from thinker.training.distributed.parallel_model import unwrapped_copy

MAX_TOKENS = 16_384  # of a batch, to score weights on


class GradualPruning(Callback):
    """Prunes a model by a schedule, with scores from the batches that it trains on."""

    def __init__(self, options: PruneConfig, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.by_row = options.by == "activation"
        self._is_complete = False

    def setup(self, parts: TrainingParts) -> None:
        """Let the optimizers keep zeros. Raises UserError if the model cannot be pruned so."""
        self.model = parts.model
        self.dist = parts.dist
        check_prunable(self.model, self.options)
        check_shares(self.model, self.options)
        self.average = find_callback(parts.callbacks, WeightAverage)
        self.weights: dict[str, Tensor] = {}
        for name, matrix in block_matrices(self.model).items():
            self.weights[f"{name}.weight"] = matrix.weight
        for optimizer in parts.optimizers.optimizers:
            held = []
            for group in optimizer.param_groups:
                names = [name for name in group["param_names"] if name in self.weights]
                held += [self.weights[name] for name in names]
            hold_zeros(optimizer, held)

    def has_final_form(self) -> bool:
        """Whether as much is zero as there should be at the end."""
        if not self._is_complete and self._has_learned():
            self._is_complete = self._reaches_shares()
        return self._is_complete

    def _reaches_shares(self) -> bool:
        options = self.options
        pairs = []  # what is zero, and the share that should be
        for block in self.model.blocks:
            pairs.append((zero_groups(block), options.heads))
            pairs.append((zero_neurons(block), options.neurons))
        for weight in self.weights.values():
            is_zero = weight == 0
            for part in is_zero if self.by_row else [is_zero]:
                pairs.append((part, options.weights))
        return all(int(is_zero.sum()) >= round(share * is_zero.numel()) for is_zero, share in pairs)

    def _has_learned(self) -> bool:
        """Whether all matrices have left the zeros that output projections begin with, and so have
        scores."""
        return all(bool(weight.any()) for weight in self.weights.values())

    def after_step(self, info: StepInfo) -> None:
        """Prune if it is time to; keep pruned weights out of the average, which comes first in the
        list."""
        start, end = self.options.window
        is_due = info.step % (self.options.every or EVERY) == 0 and info.progress >= start
        is_active = (is_due or info.progress >= end) and not self.has_final_form()
        if is_active and self._has_learned():
            self._prune(info.progress, info.batch)
        if self.average is not None:
            averages = zip(self.average.names, self.average.weights, self.average.averages)
            for name, weight, average in averages:
                if name in self.weights:
                    average.masked_fill_(weight == 0, 0)

    def _prune(self, progress: float, batch: Batch) -> None:
        """Set to zero what the schedule asks for. Rank 0 decides."""
        n_rows = max(1, MAX_TOKENS // batch.inputs.shape[1])
        own_rows = (batch.inputs[:n_rows], batch.targets[:n_rows])
        all_inputs, all_targets = zip(*self.dist.gather_objects(own_rows))
        tokens = torch.cat(all_inputs)[:n_rows].to(self.model.device)  # (B, T)
        targets = torch.cat(all_targets)[:n_rows].to(self.model.device)  # (B, T)
        if self.dist.is_main:
            self._prune_on(tokens, targets, progress)
        if self.dist.world_size > 1:
            for weight in self.weights.values():
                torch.distributed.broadcast(weight.detach(), 0)

    def _prune_on(self, tokens: Tensor, targets: Tensor, progress: float) -> None:
        """Score on tokens and targets, (B, T) each, and set the lowest to zero."""
        options = self.options
        copy = unwrapped_copy(self.model)  # with the same weights, but never compiled
        copy.activation_dtype = None  # gradients of a sum of losses may overflow in fp16
        if options.heads or options.neurons:
            head_share = options.share(options.heads, progress)
            neuron_share = options.share(options.neurons, progress)
            scores = score_parts(copy, tokens, targets, options.by, self.seed)
            for block, groups, neurons in zip(self.model.blocks, scores.groups, scores.neurons):
                n_groups = round(head_share * len(groups))
                n_neurons = round(neuron_share * len(neurons))
                set_groups_to_zero(block, lowest(groups, zero_groups(block), n_groups))
                set_neurons_to_zero(block, lowest(neurons, zero_neurons(block), n_neurons))
        if options.weights:
            by_weight = score_weights(copy, tokens, targets, options.by, self.seed)
            share = options.share(options.weights, progress)
            zero_weights(self.model, by_weight, share, self.by_row)

    def metrics(self) -> dict[str, float]:
        """The share of the weights in the blocks' matrices that are zero."""
        return {"zero_weights": zero_share(self.model)}


def hold_zeros(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
    """Keep weights that are zero before a step of the optimizer zero after it; they have no
    gradient.

    Matrices that are zero as a whole, as output projections are at the beginning, are free to
    change.
    """
    zeros: list[Tensor] = []

    @torch.no_grad()
    def remember(*_: Any) -> None:
        for weight in weights:
            is_zero = weight == 0
            zeros.append(is_zero & ~is_zero.all())
            if weight.grad is not None:  # Muon's update of a matrix depends on all of its gradient
                weight.grad.masked_fill_(zeros[-1], 0)

    @torch.no_grad()
    def restore(*_: Any) -> None:
        for weight, is_zero in zip(weights, zeros):
            weight.masked_fill_(is_zero, 0)
        zeros.clear()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(restore)
