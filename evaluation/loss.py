"""Loss over windows of tokens: the loop shared by all evaluations, and the validation loss of a
training run."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.data.batches.windows import PackedDataset, sequential_batches
from thinker.evaluation.entropy_floor import entropy_floor
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext

PROGRESS_DELAY = 1.0  # seconds


@torch.no_grad()
def batch_losses(
    model: Thinker,
    windows: PackedDataset,
    batch_size: int,
    compute_loss: Callable[[Tensor, Tensor, Tensor | None], Any],
    limit: int | None = None,
    dist: DistContext = SINGLE_PROCESS,
) -> Iterator[tuple[Tensor, Any]]:
    """Yield (targets, compute_loss(inputs, targets, document_ids)) per batch of the first `limit`
    windows, in order.

    Tensors are (B, T), on the model's device for compute_loss; the model is in evaluation mode
    until the loop ends. Several processes share the batches.
    """
    was_training = model.training
    model.eval()
    try:
        batches = sequential_batches(windows, batch_size, limit, dist.rank, dist.world_size)
        for inputs, targets in batches:
            document_ids = windows.document_ids(inputs)
            if document_ids is not None:
                document_ids = to_device(document_ids, model.device)
            loss = compute_loss(
                to_device(inputs, model.device), to_device(targets, model.device), document_ids
            )
            yield targets, loss
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class Evaluation:
    """Nats per token, bits per byte of text, and the entropy floor of the corpus (nats per token)
    if known.

    metrics: more keys of the evaluation for metrics.jsonl.
    rank: what the checkpoint `best` has the least of; None: the loss.
    """

    loss: float
    bits_per_byte: float
    entropy_floor: float | None
    n_tokens: int
    n_bytes: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    rank: float | None = None


@dataclass
class Evaluator:
    """Measure the loss on the first `limit` windows of the validation split; several processes
    share the work.

    Raises UserError if these windows have no targets.
    """

    windows: PackedDataset
    batch_size: int
    byte_lengths: np.ndarray
    limit: int | None = None
    dist: DistContext = field(default_factory=lambda: SINGLE_PROCESS)
    progress: bool = False  # show a progress bar after PROGRESS_DELAY

    def __post_init__(self) -> None:
        self.n_windows = min(self.limit or len(self.windows), len(self.windows))
        if not any(self._has_targets(index) for index in range(self.n_windows)):
            reasons = (
                "no answers (data.assistant_only_loss) or no text beyond the bidirectional prefix"
            )
            remedy = "raise train.eval_sequences or data.val_fraction"
            raise UserError(
                f"the {self.n_windows} validation sequences have no targets: {reasons}; {remedy}"
            )
        self.floor = entropy_floor(self.windows, self.limit)

    def _has_targets(self, index: int) -> bool:
        _, targets = self.windows.window(index)
        return bool((targets != IGNORE_INDEX).any())

    def __call__(
        self, model: Thinker, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Compute the loss of `model`; None if stop(), called after each batch, returns True."""
        # The sum stays on the device, to synchronize only once at the end. Apple's GPUs have no
        # float64.
        device = torch.device("cpu") if model.device.type == "mps" else model.device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        n_tokens = 0
        n_bytes = 0.0

        def loss_sum(inputs: Tensor, targets: Tensor, document_ids: Tensor | None) -> Tensor:
            missing = self.batch_size - len(inputs)
            if missing and inputs.is_cuda:
                # Fill up a short last batch, so that the model is not compiled again for its shape.
                below = (0, 0, 0, missing)
                inputs = F.pad(inputs, below)
                targets = F.pad(targets, below, value=IGNORE_INDEX)
                if document_ids is not None:
                    document_ids = F.pad(document_ids, below)
            return model(inputs, targets=targets, document_ids=document_ids)[0]

        losses = batch_losses(model, self.windows, self.batch_size, loss_sum, self.limit, self.dist)
        bar = self._bar()
        with contextlib.closing(losses), bar:  # restores the model's mode after a stop
            for targets, loss in losses:
                bar.update()
                counted = targets[targets != IGNORE_INDEX]
                n_tokens += counted.numel()
                n_bytes += float(self.byte_lengths[counted.numpy()].sum())
                nats += loss.to(nats.device, nats.dtype)
                if stop():
                    return None
        gathered = self.dist.all_gather_scalars(nats.item(), n_tokens, n_bytes)
        all_nats, all_tokens, all_bytes = zip(*gathered)
        total_nats = math.fsum(all_nats)
        total_tokens = int(sum(all_tokens))
        total_bytes = math.fsum(all_bytes)
        return Evaluation(
            loss=total_nats / total_tokens,
            bits_per_byte=total_nats / math.log(2) / max(total_bytes, 1),
            entropy_floor=self.floor,
            n_tokens=total_tokens,
            n_bytes=total_bytes,
        )

    def _bar(self) -> Progress:
        n_batches = -(-self.n_windows // (self.batch_size * self.dist.world_size))
        return Progress(
            desc="evaluating",
            total=n_batches,
            leave=False,
            delay=PROGRESS_DELAY,
            disable=not self.progress,
        )
