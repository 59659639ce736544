"""Estimate the memory of a training step without running it."""

import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thinker.data.batches.prefetch import Batch
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend
from thinker.model.kernels.blockwise_attention import blockwise_attention
from thinker.model.masks import ForwardContext
from thinker.runtime import memory
from thinker.runtime.checks import divisors
from thinker.runtime.errors import UserError
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext
from thinker.training.callbacks.setup import callbacks_of_weights
from thinker.training.objective import Loss, next_token_loss
from thinker.training.optim.muon import Muon
from thinker.training.settings.compiled_programs import CountedPrograms
from thinker.training.settings.settings import Settings
from thinker.training.settings.tensor_meter import LiveTensorMeter
from thinker.training.step import TrainingStep, recompute_activations

# What cuBLAS keeps, and the allocator adds: 0.09 GB in each of five runs on an H100
# (docs/benchmarks/gpu.md).
WORKSPACES = {"cuda": 90_000_000}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device. The peak differs from their sum, as gradients grow while activations are
    freed."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # added by one forward pass
    peak: int  # the maximum at any time, in any step but the first


class TraceableThinker(Thinker):
    """A Thinker that runs on fake tensors and takes about as much memory as the real one.

    FlexAttention and the variable-length kernel need real tensors, so plain causal attention
    replaces them. Blockwise attention consists of thousands of operations, so here each of its
    blocks covers all heads. The compiled loss is one step.
    """

    def __init__(self, config: ThinkerConfig, meter: LiveTensorMeter) -> None:
        super().__init__(config)
        self.meter = meter

    def forward(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """As Thinker.forward()."""
        if self.is_compiled and self.device.type == "cuda":
            options.setdefault("chunk_loss", _compiled_loss)
        return super().forward(*args, **options)

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
            stand_in = partial(_attend_apart, self.meter, stand_in)
            context.masks[layer] = AttentionMask(kernel="flex", compute=stand_in)
        return context


@torch._disable_dynamo  # as the kernels that it stands for
def _attend_apart(meter: LiveTensorMeter, attend: Callable[..., Tensor], *args: Any) -> Tensor:
    """Attention that is no part of a compiled block."""
    with meter.paused(False):
        return attend(*args)


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float, *_: Any) -> Tensor:
    return attend(q, k, v, AttentionMask(is_causal=True), scale)


def _attend_blockwise(
    bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, scale: float, *_: None
) -> Tensor:
    n_repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_repeats, dim=1)  # (B, H, T, D)
    v = v.repeat_interleave(n_repeats, dim=1)
    return blockwise_attention(q, k, v, scale, bias, n_scores=q.numel() * q.shape[2])


def _compiled_loss(
    logits: Tensor, targets: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The memory of fused_loss_and_gradient(). Inductor writes the gradient to a buffer and copies
    it to the logits: on an H100 the peak grows by one more chunk of logits."""
    losses = torch.empty_like(targets, dtype=torch.float32)
    if not needs_gradient:
        return losses, None
    torch.empty_like(logits)
    return losses, logits


def _normalized(updates: Tensor, row_second_moments: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The memory of Muon's compiled normalize_rows()."""
    return torch.empty_like(updates, dtype=torch.float32), torch.empty_like(row_second_moments)


def estimate_memory(
    settings: Settings, micro_batch_size: int, device: torch.device
) -> MemoryEstimate:
    """Trace a training step on fake tensors.

    Of compiled blocks it counts what their programs store. If this version of torch does not let it
    see them, it says so and counts every operation of a block, which is more except where blocks
    are recomputed.
    """
    settings = settings.with_train(micro_batch_size=micro_batch_size)
    if settings.train.precision == "fp16":
        # Same size, but no loss scale, which needs real values.
        settings = settings.with_train(precision="bf16")
    if settings.train.compile:
        try:
            return _trace_step(settings, device, counts_programs=True)
        except Exception as error:  # of any kind, as torch's compiler changes
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"memory is estimated as if nothing were fused: {reason[:150]}", file=sys.stderr)
    return _trace_step(settings, device, counts_programs=False)


def _trace_step(settings: Settings, device: torch.device, counts_programs: bool) -> MemoryEstimate:
    train = settings.train
    # The step compiles nothing itself, and recomputes blocks that are compiled.
    plain = settings.with_train(compile=False, checkpoint_every_n_blocks=None)
    if train.compile:
        plain = plain.with_train(kernels="off")
    activations = 0

    def objective(model: Thinker, batch: Batch) -> Loss:
        nonlocal activations
        before = meter.now
        loss = next_token_loss(model, batch)
        activations = meter.now - before
        return loss

    rng_state = torch.get_rng_state()
    with FakeTensorMode(), LiveTensorMeter(device) as meter:
        with device:
            model = TraceableThinker(settings.model, meter)
        weights = meter.now
        step = TrainingStep(
            model,
            plain,
            objective,
            callbacks_of_weights(settings),
            # On a CPU, the host would read whether values are finite. Fake ones are not known.
            skip_nonfinite=device.type == "cuda",
        )
        if train.compile:
            _stand_in_for_compiler(step)
        if counts_programs:
            CountedPrograms(meter).compile_blocks(model.blocks)
        if train.checkpoint_every_n_blocks:
            recompute_activations(model, train.checkpoint_every_n_blocks)
        shape = (train.micro_batch_size, settings.data.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        document_ids = tokens if settings.data.document_masking else None
        batch = Batch(tokens, tokens, tokens.numel(), document_ids)
        meter.now = weights  # the estimate excludes counters and the batch
        if train.ema_decay is not None:
            meter.now += _trained_bytes(model)
        _give_gradients(model)
        step.optimizers.step()  # the first step creates the optimizer state
        step.optimizers.zero_grad()
        model.make_context(tokens, tokens, document_ids)  # makes tables that stay
        persistent = meter.now
        if train.micro_batch_size < train.batch_size:  # gradients of earlier micro-batches exist
            _give_gradients(model)
        meter.peak = meter.now
        step(batch, 1.0)
        gradients = _trained_bytes(model)
    torch.set_rng_state(rng_state)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=persistent - weights,
        activations=activations,
        peak=meter.peak + WORKSPACES.get(device.type, 0),
    )


def _stand_in_for_compiler(step: TrainingStep) -> None:
    """Let the parts of a step outside the blocks take the memory that they take when compiled."""
    step.model.is_compiled = True
    if step.device.type != "cuda":
        return
    for optimizer in step.optimizers.optimizers:
        if isinstance(optimizer, Muon):
            optimizer.normalize_rows = _normalized


def _trained_bytes(model: Thinker) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _give_gradients(model: Thinker) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def usable_fraction(device: torch.device) -> float:
    """Fraction of free memory that tensors can use; allocators lose the rest to fragmentation."""
    return 0.95 if device.type == "cuda" else 0.6  # 0.6: malloc


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
