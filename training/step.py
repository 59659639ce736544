"""One optimizer step: forward and backward over micro-batches, gradient clipping, update."""

import contextlib
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from thinker.data.batches.prefetch import Batch
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.device import DTYPES
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext, full_tensor
from thinker.training.callback import Callback, TrainingParts
from thinker.training.kernels import cached_weight_casts, choose_kernels, fused_kernels
from thinker.training.objective import Loss, Objective, next_token_loss
from thinker.training.optim.optimizers import Optimizers
from thinker.training.settings.settings import Settings


class TrainingStep:
    """A model, its optimizers, and the training step.

    With `skip_nonfinite`, a step with a non-finite loss or gradient changes nothing. `n_nonfinite`
    counts such steps on the device (in fp16 by their losses only, as gradients overflow by design).
    After more than train.max_nonfinite_steps no step changes anything, so the weights are intact
    when the host reads the count.
    """

    def __init__(
        self,
        model: Thinker,
        settings: Settings,
        objective: Objective = next_token_loss,
        callbacks: Sequence[Callback] = (),
        skip_nonfinite: bool = True,
        dist: DistContext = SINGLE_PROCESS,
    ) -> None:
        train = settings.train
        self.train = train
        self.dist = dist
        self.objective = objective
        self.callbacks = list(callbacks)
        self.skip_nonfinite = skip_nonfinite

        self.model = model.train()
        self.model.activation_dtype = DTYPES[train.precision]
        if train.lora_rank is not None:
            from thinker.model.lora import add_lora

            alpha = train.lora_alpha or 2 * train.lora_rank
            add_lora(self.model, train.lora_rank, alpha / train.lora_rank)
        if train.compile:
            compile_blocks(self.model)
        if train.checkpoint_every_n_blocks:
            recompute_activations(self.model, train.checkpoint_every_n_blocks)
        self.parallel_model: nn.Module = self.model
        if dist.world_size > 1:
            from thinker.training.distributed.parallel_model import parallelize

            self.parallel_model = parallelize(self.model, train.parallel, dist)
        self.device = self.model.device  # FSDP2 may have moved it
        self.kernels, self.kernel_problem = choose_kernels(self.model, train, self.device)
        if self.kernels.problem and dist.is_main:
            print(self.kernels.problem, file=sys.stderr)
        is_fused = self.kernels.is_native
        self.optimizers = Optimizers(self.model, settings.optimizer, is_fused=is_fused)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        self.n_nonfinite = torch.zeros((), dtype=torch.int64, device=self.device)

        # The parts of the newest loss: their keys in metrics.jsonl, and (P, 2) sums and numbers of
        # targets.
        self.part_names: list[str] = []
        self.part_sums = torch.zeros(0, 2, device=self.device)

        self.parts = TrainingParts(
            self.model, self.optimizers, settings, dist, self.kernels, self.callbacks
        )
        for callback in self.callbacks:
            callback.setup(self.parts)
        if hasattr(self.parallel_model, "no_sync"):  # DDP
            from thinker.training.distributed.parallel_model import warm_up_buckets

            with self.fast_model():
                warm_up_buckets(self.parallel_model, settings, self.device)
            self.optimizers.zero_grad()

    @contextlib.contextmanager
    def fast_model(self) -> Iterator[None]:
        """Context in which the model runs as fast as it can: with kernels, and with weights that
        are cast once."""
        with cached_weight_casts(self.model), fused_kernels(self.model, self.kernels):
            yield

    def __call__(self, batch: Batch, lr_multiplier: float) -> tuple[Tensor, Tensor]:
        """Run a step. Returns loss (nats per token) and gradient norm before clipping, both on the
        device.

        Each rank passes its own rows and the total number of targets. All ranks get the same
        result. `part_names` and `part_sums` then have the parts of the loss.
        """
        self.optimizers.set_lr(lr_multiplier)
        n_targets = max(batch.n_targets, 1)  # of all ranks
        size = self.train.micro_batch_size
        n_rows = len(batch.inputs)
        sums = 0.0  # the loss, and what its parts consist of
        with self.fast_model():
            for start in range(0, n_rows, size):
                micro_batch = batch.rows(slice(start, start + size), self.device)
                is_last = start + size >= n_rows
                with gradient_sync(self.parallel_model, is_last):
                    with self._offloaded_activations():
                        loss = self.objective(self.parallel_model, micro_batch)
                    self.scaler.scale(loss.sum / n_targets).backward()
                self.part_names = list(loss.parts)
                sums = sums + loss_values(loss)

        for optimizer in self.optimizers.optimizers:
            self.scaler.unscale_(optimizer)
        for callback in self.callbacks:
            callback.before_clip()
        grad_norm = clip_gradients(self.model, self.train.grad_clip)

        if self.dist.world_size > 1:
            torch.distributed.all_reduce(sums)
        loss = sums[0] / n_targets
        self.part_sums = sums[1:].view(-1, 2)
        skip = self._should_skip(loss, grad_norm) if self.skip_nonfinite else None
        self.optimizers.step(skip)
        self.scaler.update()
        self.optimizers.zero_grad()
        return loss, grad_norm

    def _offloaded_activations(self) -> contextlib.AbstractContextManager:
        if self.train.offload_activations:
            return save_on_cpu(pin_memory=True)
        return contextlib.nullcontext()

    def _should_skip(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Count non-finite steps. Returns whether to skip this step, on the device."""
        is_finite = loss.isfinite() & grad_norm.isfinite()
        is_counted = loss.isfinite() if self.scaler.is_enabled() else is_finite
        self.n_nonfinite += ~is_counted
        return ~is_finite | (self.n_nonfinite > self.train.max_nonfinite_steps)


def compile_blocks(model: Thinker) -> None:
    """Compile each block in place, which keeps the names of parameters."""
    # Each kind of layer needs a graph. Beyond this limit (default: 8) torch silently stops
    # compiling.
    torch._dynamo.config.recompile_limit = 256
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.is_compiled = True


def recompute_activations(model: Thinker, every: int) -> None:
    """Let every n-th block compute its activations again in the backward pass (Chen et al. 2016,
    arXiv:1604.06174)."""
    for block in model.blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def gradient_sync(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Context in which a backward pass sums gradients over the ranks only for the last micro-batch
    of a batch."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "no_sync") and not is_last:  # DDP
        return model.no_sync()
    return contextlib.nullcontext()


def loss_values(loss: Loss) -> Tensor:
    """The sum in nats, then a sum and a number of targets for each of P parts, (1 + 2P,) fp32."""
    total = loss.sum if loss.cross_entropy is None else loss.cross_entropy
    values = [total]
    for part_sum, n_targets in loss.parts.values():
        values += [part_sum, n_targets]
    return torch.stack([value.detach().float() for value in values])


def clip_gradients(model: Thinker, limit: float | None) -> Tensor:
    """Scale all gradients down if their joint norm is above `limit`. Returns the norm before, on
    the device."""
    limit = limit or math.inf
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if any(hasattr(grad, "to_local") for grad in grads):  # sharded
        return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    # As in clip_grad_norm_(), which takes twice as long for a small model.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    has_value = norm.device.type == "cpu" and not isinstance(norm, FakeTensor)
    if has_value and bool(norm + 1e-6 <= limit):
        return norm  # a factor of 1, for which all gradients would be read and written
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def build_model(
    config: ThinkerConfig,
    seed: int,
    device: torch.device,
    initial: Thinker | None = None,
    kind: type[Thinker] = Thinker,
) -> Thinker:
    """A new model of a class, or `initial`, on the device. Random weights come from the CPU and are
    equal on all devices."""
    torch.manual_seed(seed)
    model = kind(config) if initial is None else initial
    return model.to(device)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout for this step and rank, independently of interruptions."""
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
