"""Gradual pruning during training (Zhu & Gupta 2017, arXiv:1710.01878): more and more weights become zero.

What is pruned follows from the weights alone: a weight that is zero before an optimizer step is zero after it. So
checkpoints need no masks, and a model that is already pruned keeps its zeros.
"""

from typing import Any

import torch
from torch import Tensor

from thinker.data.batches.prefetch import Batch
from thinker.features.pruning.keys import EVERY, PruneConfig
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
from thinker.model import Thinker
from thinker.model.layers import Linear
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import DistContext
from thinker.training.after_step import AfterStep
from thinker.training.nonfinite import unwrapped_copy
from thinker.training.optim.optimizers import Optimizers
from thinker.training.weight_average import WeightAverage

MAX_TOKENS = 16_384  # of a batch, to score weights on


class GradualPruning(AfterStep):
    """Prunes a model by a schedule, with scores from the batches that it trains on."""

    def __init__(
        self, model: Thinker, optimizers: Optimizers, average: WeightAverage | None, options: PruneConfig,
        seed: int, dist: DistContext,
    ) -> None:  # fmt: skip
        super().__init__(average)
        self.model, self.options, self.seed, self.dist = model, options, seed, dist
        self.matrices = {
            f"{name}.weight": matrix.weight for name, matrix in block_matrices(model).items()
        }
        self.by_row = options.by == "activation"
        self._is_complete = False
        check_shares(model, options)
        for optimizer in optimizers.optimizers:
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            hold_zeros(optimizer, [self.matrices[name] for name in names if name in self.matrices])

    @property
    def is_complete(self) -> bool:
        """Whether as much is zero as there should be at the end."""
        if not self._is_complete and self._has_learned():
            options, blocks = self.options, self.model.blocks
            pairs = [(zero_groups(block), options.heads) for block in blocks]
            pairs += [(zero_neurons(block), options.neurons) for block in blocks]
            for weight in self.matrices.values():
                is_zero = weight == 0
                pairs += (
                    [(row, options.weights) for row in is_zero]
                    if self.by_row
                    else [(is_zero, options.weights)]
                )
            self._is_complete = all(
                int(is_zero.sum()) >= round(share * is_zero.numel()) for is_zero, share in pairs
            )
        return self._is_complete

    def _has_learned(self) -> bool:
        """Whether all matrices have left the zeros that output projections begin with, and so have scores."""
        return all(bool(weight.any()) for weight in self.matrices.values())

    def update(self, step: int, progress: float, batch: Batch) -> None:
        """Prune if it is time to; keep pruned weights out of the average."""
        super().update(step, progress, batch)
        start, end = self.options.window
        is_due = step % (self.options.every or EVERY) == 0 and progress >= start
        if (is_due or progress >= end) and not self.is_complete and self._has_learned():
            self._prune(progress, batch)
        if self.average is not None:
            for name, weight, average in zip(
                self.average.names, self.average.weights, self.average.averages
            ):
                if name in self.matrices:
                    average.masked_fill_(weight == 0, 0)

    def _prune(self, progress: float, batch: Batch) -> None:
        """Set to zero what the schedule asks for. Rank 0 decides."""
        rows = max(1, MAX_TOKENS // batch.inputs.shape[1])
        parts = zip(*self.dist.gather_objects((batch.inputs[:rows], batch.targets[:rows])))
        tokens, targets = (
            torch.cat(part)[:rows].to(self.model.device) for part in parts
        )  # (B, T) each
        if self.dist.is_main:
            self._prune_on(tokens, targets, progress)
        if self.dist.world_size > 1:
            for weight in self.matrices.values():
                torch.distributed.broadcast(weight.detach(), 0)

    def _prune_on(self, tokens: Tensor, targets: Tensor, progress: float) -> None:
        """Score on tokens and targets, (B, T) each, and set the lowest to zero."""
        options = self.options
        copy = unwrapped_copy(self.model)  # with the same weights, but never compiled
        copy.activation_dtype = None  # gradients of a sum of losses may overflow in fp16
        if options.heads or options.neurons:
            scores = score_parts(copy, tokens, targets, options.by, self.seed)
            for layer, block in enumerate(self.model.blocks):
                groups, neurons = scores.groups[layer], scores.neurons[layer]
                n_groups, n_neurons = (
                    round(options.share(final, progress) * len(each))
                    for final, each in ((options.heads, groups), (options.neurons, neurons))
                )
                set_groups_to_zero(block, lowest(groups, zero_groups(block), n_groups))
                set_neurons_to_zero(block, lowest(neurons, zero_neurons(block), n_neurons))
        if options.weights:
            by_weight = score_weights(copy, tokens, targets, options.by, self.seed)
            zero_weights(
                self.model, by_weight, options.share(options.weights, progress), self.by_row
            )

    def metrics(self) -> dict[str, float]:
        """The share of the weights in the blocks' matrices that are zero."""
        return {"zero_weights": zero_share(self.model)}


def hold_zeros(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
    """Keep weights that are zero before a step of the optimizer zero after it; they have no gradient.

    Matrices that are zero as a whole, as output projections are at the beginning, are free to change.
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


def check_shares(model: Thinker, options: PruneConfig) -> None:
    """Raise UserError unless pruning removes some, and not all, of the parts of every layer."""
    for layer, block in enumerate(model.blocks):
        matrices = [matrix.weight for matrix in block.modules() if isinstance(matrix, Linear)]
        n_weights = min(
            weight.shape[1] if options.by == "activation" else weight.numel() for weight in matrices
        )
        where = "a row" if options.by == "activation" else "the smallest matrix"
        for key, share, n, parts in (
            ("heads", options.heads, block.attention.n_kv_heads, "KV heads"),
            ("neurons", options.neurons, block.mlp.down_proj.in_features, "neurons"),
            ("weights", options.weights, n_weights, f"weights in {where}"),
        ):
            if share and not 0 < round(share * n) < n:
                removes = "all" if round(share * n) else "none"
                raise UserError(
                    f"train.prune.{key}={share:g} removes {removes} of the {n} {parts} of layer {layer}; change it"
                )
