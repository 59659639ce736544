"""One optimizer step: forward and backward over micro-batches, gradient clipping, update."""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from thinker.data.batches.prefetch import Batch
from thinker.features.distillation.distillation import make_loss
from thinker.features.distillation.teacher import Teacher
from thinker.features.mixtures.reports import sum_by_source
from thinker.features.pruning.make_pruning import make_after_step
from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import add_lora
from thinker.runtime.device import DTYPES
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext, full_tensor
from thinker.training.distributed import gradient_sync, parallelize
from thinker.training.kernels import cached_weight_casts, choose_kernels, fused_kernels
from thinker.training.optim.optimizers import Optimizers
from thinker.training.settings.settings import Settings


class TrainingStep:
    """A model, its optimizers, and the training step.

    With `skip_nonfinite`, a step with a non-finite loss or gradient changes nothing. `n_nonfinite` counts such steps on
    the device (in fp16 by their losses only, as gradients overflow by design). After more than
    train.max_nonfinite_steps no step changes anything, so the weights are intact when the host reads the count.
    """

    def __init__(
        self, model: Thinker, settings: Settings, skip_nonfinite: bool = True, dist: DistContext = SINGLE_PROCESS,
        teacher: Teacher | None = None,
    ) -> None:  # fmt: skip
        self.train, self.model, self.dist = settings.train, model.train(), dist
        self.model.activation_dtype = DTYPES[self.train.precision]
        if (rank := self.train.lora_rank) is not None:
            add_lora(self.model, rank, (self.train.lora_alpha or 2 * rank) / rank)
        self.parallel_model = parallelize(self.model, self.train, dist)
        self.device = self.model.device  # FSDP2 may have moved it
        self.kernels, self.kernel_problem = choose_kernels(self.train, self.device)
        self.compute_loss = make_loss(self.model, self.parallel_model, teacher, self.kernels)
        self.optimizers = Optimizers(
            self.model, settings.optimizer, is_fused=self.kernels is not None
        )
        self.after_step = make_after_step(self.model, self.optimizers, settings, dist)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.train.precision == "fp16")
        self.skip_nonfinite = skip_nonfinite
        self.before_clipping: Callable[[], None] | None = (
            None  # called with the gradients of the batch in place
        )
        self.n_sources = len(settings.data.sources or ())
        self.n_nonfinite = torch.zeros((), dtype=torch.int64, device=self.device)
        if hasattr(self.parallel_model, "no_sync"):
            self._warm_up_buckets(settings)

    def _warm_up_buckets(self, settings: Settings) -> None:
        """Run a backward pass with zero gradients, so that all later passes, also of a resumed run, are equal.

        DDP assigns gradients to buckets in its first pass, and the last bits of a sum depend on the position there.
        """
        shape = (self.train.micro_batch_size, settings.data.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        document_ids = tokens if settings.data.document_masking else None
        with cached_weight_casts(self.model), fused_kernels(self.model, self.kernels):
            (
                self.parallel_model(tokens, targets=tokens, document_ids=document_ids)[0] * 0
            ).backward()
        self.optimizers.zero_grad()

    def __call__(self, batch: Batch, lr_multiplier: float) -> tuple[Tensor, Tensor]:
        """Run a step. Returns loss (nats per token) and gradient norm before clipping, both on the device.

        Each rank passes its own rows and the total number of targets. All ranks get the same result. `part_sums` has
        the sum and the number of targets of each part of the loss and of each source of a mixture, (P + S, 2).
        """
        train, rows = self.train, len(batch.inputs)
        self.optimizers.set_lr(lr_multiplier)
        n_parts, n_sources = (
            len(self.compute_loss.parts),
            0 if batch.sources is None else self.n_sources,
        )
        sums = torch.zeros(1 + 2 * (n_parts + n_sources), device=self.device)
        total, self.part_sums = sums[0], sums[1:].view(-1, 2)
        with cached_weight_casts(self.model), fused_kernels(self.model, self.kernels):
            for start in range(0, rows, train.micro_batch_size):
                part = slice(start, start + train.micro_batch_size)
                inputs, targets, document_ids = (
                    tensor
                    if tensor is None
                    else tensor[part].to(self.device, non_blocking=True)  # (b, T)
                    for tensor in (batch.inputs, batch.targets, batch.document_ids)
                )
                with gradient_sync(self.parallel_model, is_last=part.stop >= rows):
                    with (
                        save_on_cpu(pin_memory=True)
                        if train.offload_activations
                        else contextlib.nullcontext()
                    ):
                        losses = (
                            torch.empty(targets.shape, device=self.device) if n_sources else None
                        )
                        windows = None if batch.windows is None else batch.windows[part]
                        loss = self.compute_loss(inputs, targets, document_ids, losses, windows)
                    self.scaler.scale(loss.objective / max(batch.n_targets, 1)).backward()
                total += loss.cross_entropy
                self.part_sums[:n_parts] += loss.part_sums
                if n_sources:
                    sources = batch.sources[part].to(self.device)
                    self.part_sums[n_parts:] += sum_by_source(sources, n_sources, losses, targets)
        for optimizer in self.optimizers.optimizers:
            self.scaler.unscale_(optimizer)
        if self.before_clipping is not None:
            self.before_clipping()
        grad_norm = clip_gradients(self.model, train.grad_clip)
        if self.dist.world_size > 1:
            torch.distributed.all_reduce(sums)
        loss = total / max(batch.n_targets, 1)
        self.optimizers.step(self._should_skip(loss, grad_norm) if self.skip_nonfinite else None)
        self.scaler.update()
        self.optimizers.zero_grad()
        return loss, grad_norm

    def _should_skip(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Count non-finite steps. Returns whether to skip this step, on the device."""
        is_finite = loss.isfinite() & grad_norm.isfinite()
        self.n_nonfinite += ~(loss.isfinite() if self.scaler.is_enabled() else is_finite)
        return ~is_finite | (self.n_nonfinite > self.train.max_nonfinite_steps)


def clip_gradients(model: Thinker, limit: float | None) -> Tensor:
    """Scale all gradients down if their joint norm is above `limit`. Returns the norm before, on the device."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if any(hasattr(grad, "to_local") for grad in grads):  # sharded
        return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf))
    # As in clip_grad_norm_(), which takes twice as long for a small model.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, ((limit or math.inf) / (norm + 1e-6)).clamp(max=1.0))
    return norm


def build_model(
    config: ThinkerConfig, seed: int, device: torch.device, initial: Thinker | None = None
) -> Thinker:
    """A new model, or `initial`, on the device. Random weights come from the CPU and are equal on all devices."""
    torch.manual_seed(seed)
    return (Thinker(config) if initial is None else initial).to(device)
