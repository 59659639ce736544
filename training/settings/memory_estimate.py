"""Estimate the memory of a training step without running it."""

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from thinker.data.batches.prefetch import Batch
from thinker.model import KVCache, Thinker
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.model.kernels.blockwise_attention import blockwise_attention
from thinker.model.masks import ForwardContext
from thinker.runtime import memory
from thinker.runtime.checks import divisors
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.callbacks.setup import callbacks_of_weights
from thinker.training.kernels import fused_kernels
from thinker.training.settings.settings import Settings
from thinker.training.step import TrainingStep


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device. The peak differs from their sum, as gradients grow while activations are
    freed."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # added by one forward pass
    peak: int  # the maximum at any time, in any step but the first


class LiveTensorMeter(TorchDispatchMode):
    """Counts the bytes of all live tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.now = 0
        self.peak = 0
        self.storages = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed, unless another tensor shares it."""
        storage = tensor.untyped_storage()
        if storage not in self.storages:
            self.storages[storage] = True
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)


class TraceableThinker(Thinker):
    """A Thinker with traceable attention that takes about as much memory as the real one.

    FlexAttention and the variable-length kernel need real tensors, so plain causal attention
    replaces them. Blockwise attention consists of thousands of operations, so here each of its
    blocks covers all heads.
    """

    def make_context(
        self,
        inputs: Tensor,
        tokens: Tensor | None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ForwardContext:
        """Like Thinker.make_context(). On a GPU masks depend on documents, so each sequence counts
        as one document."""
        if inputs.is_cuda:
            document_ids = None
        context = super().make_context(inputs, tokens, document_ids)
        for layer, mask in enumerate(context.masks):
            if mask.kernel == "flex":
                stand_in = _attend_causally
            elif mask.kernel == "blockwise":
                stand_in = partial(_attend_blockwise, mask.allowed)
            else:
                continue
            context.masks[layer] = AttentionMask(kernel="flex", compute=stand_in)
        return context


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float, *_: Any) -> Tensor:
    return attend(q, k, v, AttentionMask(is_causal=True), scale)


def _attend_blockwise(
    bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, scale: float, *_: None
) -> Tensor:
    n_repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_repeats, dim=1)  # (B, H, T, D)
    v = v.repeat_interleave(n_repeats, dim=1)
    return blockwise_attention(q, k, v, scale, bias, n_scores=q.numel() * q.shape[2])


def estimate_memory(
    settings: Settings, micro_batch_size: int, device: torch.device
) -> MemoryEstimate:
    """Trace a training step on fake tensors. Excludes workspaces of kernels and overhead of
    allocators."""
    accumulates = micro_batch_size < settings.train.batch_size
    settings = settings.with_train(micro_batch_size=micro_batch_size, compile=False)
    if settings.train.precision == "fp16":
        # Same size, but no loss scale, which needs real values.
        settings = settings.with_train(precision="bf16")
    rng_state = torch.get_rng_state()
    with FakeTensorMode(), LiveTensorMeter(device) as meter:
        with device:
            model = TraceableThinker(settings.model)
        weights = meter.now
        callbacks = callbacks_of_weights(settings)
        # Fake tensors have no values to check.
        step = TrainingStep(model, settings, callbacks=callbacks, skip_nonfinite=False)
        shape = (micro_batch_size, settings.data.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        document_ids = tokens if settings.data.document_masking else None
        batch = Batch(tokens, tokens, tokens.numel(), document_ids)
        meter.now = weights  # the estimate excludes counters and the batch
        if settings.train.ema_decay is not None:
            meter.now += _trained_bytes(model)
        _give_gradients(model)
        step.optimizers.step()  # the first step creates the optimizer state
        step.optimizers.zero_grad()
        with fused_kernels(step.model, step.kernels):
            loss = step.model(tokens, targets=tokens, document_ids=document_ids)
        with_activations = meter.now
        del loss
        persistent = meter.now
        if accumulates:  # gradients of earlier micro-batches exist
            _give_gradients(model)
        meter.peak = meter.now
        step(batch, 1.0)
        gradients = _trained_bytes(model)
    torch.set_rng_state(rng_state)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=persistent - weights,
        activations=with_activations - persistent,
        peak=meter.peak,
    )


def _trained_bytes(model: Thinker) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _give_gradients(model: Thinker) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def usable_fraction(device: torch.device) -> float:
    """Fraction of free memory that tensors can use; allocators lose the rest to fragmentation."""
    return 0.9 if device.type == "cuda" else 0.6  # 0.6: malloc


def free_memory(device: torch.device, dist: DistContext = SINGLE_PROCESS) -> int:
    """Bytes that each rank can allocate now. Ranks on one host share its memory equally. All ranks
    must call this."""
    sharing = 1 if device.type == "cuda" else dist.local_world_size
    of_ranks = dist.all_gather_scalars(memory.free_memory(device) // sharing)
    return int(min(free for (free,) in of_ranks))


def largest_micro_batch(
    settings: Settings, device: torch.device, free: int, dist: DistContext = SINGLE_PROCESS
) -> int:
    """Largest micro-batch whose peak fits in `free` bytes. Raises UserError if not even one
    sequence fits."""
    rows = settings.train.batch_size // dist.world_size
    elsewhere = 0.0  # the share of weights and optimizer state that other ranks have
    if settings.train.parallel == "fsdp":
        elsewhere = 1 - 1 / dist.world_size

    @cache
    def peak(size: int) -> float:
        estimate = estimate_memory(settings, size, device)
        return estimate.peak - elsewhere * (estimate.weights + estimate.optimizer)

    limit = usable_fraction(device) * free
    # Without gradient accumulation it may need less than half the batch does.
    if peak(rows) <= limit:
        return rows
    parts = divisors(rows)[:-1]
    n_fitting = bisect_right(parts, limit, key=peak)
    if n_fitting:
        return parts[n_fitting - 1]
    needed = memory.format_bytes(peak(1))
    available = memory.format_bytes(free)
    raise UserError(
        f"one sequence of {settings.data.seq_len} tokens needs {needed}, but only {available} is "
        f"free; set train.checkpoint_every_n_blocks=1, lower data.seq_len or use a smaller model"
    )
