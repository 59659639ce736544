"""One optimizer step: forward and backward over micro-batches, clipping, update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from thinker.data.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.model.linear import Linear
from thinker.model.lora import add_lora
from thinker.runtime.device import DTYPES
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext
from thinker.training.activation_checkpointing import offload
from thinker.training.config import Config
from thinker.training.distributed import clip, distribute, gradient_sync
from thinker.training.optimizers import Optimizers, finetune_lr_scale, resolve_learning_rates


class TrainingStep:
    """A model, its optimizers and the step that training repeats. The config's choices must be settled.

    Attributes:
        bad: how many steps had a loss or gradient that is not finite (in fp16 a loss: gradients overflow by design).
            Such a step changes nothing, and after train.max_nonfinite_steps of them none does any more, so that
            the weights are still those of before when the host comes to know. Counted on the device.
        guarded: whether that is looked at.
    """

    def __init__(
        self, model: Thinker, config: Config, guarded: bool = True, dist: DistContext = SINGLE_PROCESS
    ) -> None:
        self.train, self.model, self.dist = config.train, model.train(), dist
        self.model.activation_dtype = DTYPES[self.train.precision]
        if self.train.lora_rank is not None:
            rank = self.train.lora_rank
            add_lora(self.model, rank, (self.train.lora_alpha or 2 * rank) / rank)
        rates = resolve_learning_rates(
            config.optimizer, model.config, config.train.batch_size, finetune_lr_scale(config)
        )
        self.parallel_model = distribute(self.model, self.train, dist)
        self.device = self.model.device  # where it may have been brought by sharing it
        self.optimizers = Optimizers(self.model, rates)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.train.precision == "fp16")
        self.guarded, self.n_nonfinite = guarded, torch.zeros((), dtype=torch.int64, device=self.device)
        if hasattr(self.parallel_model, "no_sync"):
            # DDP puts gradients into buckets as its first backward pass finds them, and a sum's last bits depend on
            # its place there. After this pass no step is a first one, neither of a new run nor of one that goes on.
            tokens = torch.zeros(
                self.train.micro_batch_size, config.data.seq_len, dtype=torch.int64, device=self.device
            )
            with cached_weight_casts(self.model):
                documents = tokens if config.data.document_masking else None
                (self.parallel_model(tokens, targets=tokens, document_ids=documents)[0] * 0).backward()
            self.optimizers.zero_grad()

    def __call__(self, batch: Batch, lr_multiplier: float) -> tuple[Tensor, Tensor]:
        """Make a step. Returns loss (nats a token) and the gradient's norm before clipping, both still on the device.

        Of several ranks each gives its rows of the batch, `count` being that of them all, and each gets the same.
        """
        train, size = self.train, self.train.micro_batch_size
        self.optimizers.set_lr(lr_multiplier)
        total = torch.zeros((), device=self.device)
        with cached_weight_casts(self.model):
            for part in range(0, rows := len(batch.inputs), size):
                x, y, documents = (
                    whole if whole is None else whole[part : part + size].to(self.device, non_blocking=True)  # (b, T)
                    for whole in (batch.inputs, batch.targets, batch.document_ids)
                )
                with gradient_sync(self.parallel_model, now=part + size >= rows):
                    with offload() if train.offload_activations else contextlib.nullcontext():
                        loss_sum, _ = self.parallel_model(x, targets=y, document_ids=documents)
                    self.scaler.scale(loss_sum / max(batch.n_targets, 1)).backward()
                total += loss_sum.detach()
        for optimizer in self.optimizers.optimizers:
            self.scaler.unscale_(optimizer)
        grad_norm = clip(self.model, train.grad_clip)
        if self.dist.world_size > 1:
            torch.distributed.all_reduce(total)
        loss = total / max(batch.n_targets, 1)
        self.optimizers.step(self.skip(loss, grad_norm) if self.guarded else None)
        self.scaler.update()
        self.optimizers.zero_grad()
        return loss, grad_norm

    def skip(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Count a bad step; whether this one must change nothing, still on the device."""
        finite = loss.isfinite() & grad_norm.isfinite()
        self.n_nonfinite += ~(loss.isfinite() if self.scaler.is_enabled() else finite)
        return ~finite | (self.n_nonfinite > self.train.max_nonfinite_steps)


def build_model(config: ThinkerConfig, seed: int, device: torch.device, begun: Thinker | None = None) -> Thinker:
    """A new model; drawn on the CPU, so that it is the same on every device. Or one that there is, `begun`."""
    torch.manual_seed(seed)
    return (Thinker(config) if begun is None else begun).to(device)


@contextlib.contextmanager
def cached_weight_casts(model: Thinker) -> Iterator[None]:
    """Within it each matrix is cast to the activations' precision once, for any number of passes.

    Gradients reach the weights themselves and add up in their precision. For as long, the weights must not change.
    """
    weights = model.embedding.weight.dtype
    sharded = hasattr(model, "unshard")  # FSDP2 gathers those of blocks in that precision
    matrices = [m for m in model.modules() if isinstance(m, Linear) and model.dtype != weights and not sharded]
    try:
        for matrix in matrices:
            matrix.cached_weight = matrix.weight.to(model.dtype)
        if model.lm_head.cached_weight is not None:
            model.lm_head.cached_weight = (
                model.lm_head.cached_weight.detach()
            )  # the loss gives its weight a gradient in full precision
        yield
    finally:
        for matrix in matrices:
            matrix.cached_weight = None
