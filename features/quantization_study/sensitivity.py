"""What it costs to store a matrix in few bits, or to compute a head's scores or its sums of values
in few bits.

Each is measured alone, as the change of the loss on the same sequences. An assignment gives more
bits to the matrices that gain most per byte.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from thinker.evaluation.perplexity import estimate_ratio
from thinker.evaluation.sequence_losses import sequence_losses
from thinker.generation.decoders.fused_matrices import fused_matrices
from thinker.model import Thinker
from thinker.model.config import BIASES
from thinker.model.layers import Linear
from thinker.native.quantization import GROUP, quantize
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

CONFIDENCE = 0.95
SCALE_BYTES = 2  # per group of 32 weights


# By name and bits, a function that returns a context in which this part of the model has so many
# bits.
Changes = dict[tuple[str, int], Callable[[], contextlib.AbstractContextManager]]


@dataclass(frozen=True)
class Cost:
    """The change of the loss in nats per token if one part of a model has few bits, with a 95%
    interval."""

    # of a matrix in fused_matrices(), "blocks.i.attention.scores.h" or "blocks.i.attention.sums.h"
    name: str
    bits: int
    loss: float
    low: float | None
    high: float | None


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """A matrix (n_out, n_in) with weights in 8, 4 or 1 bits and a scale per 32 inputs, in fp32.

    With 1 bit, a weight keeps its sign, and the scale is the mean of the absolute values (Rastegari
    et al. 2016, arXiv:1603.05279).
    """
    if bits != 1:
        return quantize(weight, bits).dequantize()
    n_in = weight.shape[1]
    padding = -n_in % GROUP
    groups = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(
        1, (-1, GROUP)
    )  # (n_out, groups, 32)
    counts = torch.full((groups.shape[1], 1), float(GROUP), device=weight.device)
    counts[-1] -= padding
    scale = groups.abs().sum(-1, keepdim=True) / counts  # (n_out, groups, 1)
    return torch.where(groups < 0, -scale, scale).flatten(1)[:, :n_in]


def round_vectors(x: Tensor, bits: int) -> Tensor:
    """Vectors (..., D) in so many bits, with a scale for each."""
    if bits == 1:
        return torch.where(x < 0, -1.0, 1.0) * x.abs().mean(-1, keepdim=True)
    scale = (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-30)
    return (x / scale).round() * scale


@contextlib.contextmanager
@torch.no_grad()
def rounded(matrices: tuple[Linear, ...], bits: int) -> Iterator[None]:
    """Context manager: these matrices, which are one for inference, have rounded weights."""
    kept = [linear.weight for linear in matrices]
    parts = round_weight(torch.cat(kept), bits).split([len(weight) for weight in kept])
    try:
        for linear, part in zip(
            matrices, parts
        ):  # another parameter, as an embedding may share the old one
            linear.weight = nn.Parameter(part.to(linear.weight.dtype), requires_grad=False)
        yield
    finally:
        for linear, weight in zip(matrices, kept):
            linear.weight = weight


@contextlib.contextmanager
def rounded_scores(model: Thinker, layer: int, head: int, bits: int) -> Iterator[None]:
    """Context manager: one head attends by the scores of rounded queries and keys."""
    name, attention = f"blocks.{layer}.attention", model.blocks[layer].attention
    group = head // (attention.n_heads // attention.n_kv_heads)
    with model.record(f"{name}.q", f"{name}.k") as recorded:

        def replace(weights: Tensor) -> Tensor:  # (B, H, T, T)
            q = recorded[f"{name}.q"][:, head].float()  # (B, T, D)
            k = recorded[f"{name}.k"][:, group].float()  # (B, T, D)
            scores = round_vectors(q, bits) @ round_vectors(k, bits).mT * attention.scale
            cap = attention.attn_logit_softcap
            if cap is not None:
                scores = cap * (scores / cap).tanh()
            is_hidden = weights[:, head] <= 0
            rounded = scores.masked_fill(is_hidden, -torch.inf).softmax(-1).nan_to_num(0)
            weights = weights.clone()
            weights[:, head] = rounded.to(weights.dtype)
            return weights

        with model.patch({f"{name}.weights": replace}):
            yield


@contextlib.contextmanager
def rounded_sums(model: Thinker, layer: int, head: int, bits: int) -> Iterator[None]:
    """Context manager: one head sums rounded values with rounded weights, as an integer product
    would.

    A value is codes times a scale. The scale joins the weight of its key, and the weights of a
    query are rounded to 2^bits levels from 0 to the largest.
    """
    name, attention = f"blocks.{layer}.attention", model.blocks[layer].attention
    group = head // (attention.n_heads // attention.n_kv_heads)
    with model.record(f"{name}.v", f"{name}.weights") as recorded:

        def replace(y: Tensor) -> Tensor:  # (B, T, D)
            v = recorded[f"{name}.v"][:, group].float()
            values = round_vectors(v, bits)
            scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # (B, S, 1)
            weights = recorded[f"{name}.weights"][:, head].float() * scale.mT  # (B, T, S)
            step = weights.amax(-1, keepdim=True) / (2**bits - 1)
            return ((weights / step.clamp_min(1e-30)).round() * step @ (values / scale)).to(y.dtype)

        with model.patch({f"{name}.heads.{head}": replace}):
            yield


def measure(
    model: Thinker, tokens: Tensor, targets: Tensor, changes: Changes
) -> tuple[float, list[Cost]]:
    """The loss of the model in nats per token, and the cost of each change, by name and bits."""
    before, counts = sequence_losses(model, tokens, targets)
    costs = []
    for (name, bits), change in Progress(changes.items(), desc="measuring"):
        with change():
            after, _ = sequence_losses(model, tokens, targets)
        estimate = estimate_ratio(after - before, counts, CONFIDENCE)
        costs.append(Cost(name, bits, estimate.mean, estimate.low, estimate.high))
    return float(before.sum() / counts.sum()), costs


def matrix_changes(model: Thinker, bits: tuple[int, ...] = (8, 4, 1)) -> Changes:
    """The changes for measure(): each matrix with so many bits."""
    changes: Changes = {}
    for name, linears in fused_matrices(model).items():
        for n in bits:
            changes[name, n] = partial(rounded, linears, n)
    return changes


def head_changes(model: Thinker, bits: tuple[int, ...] = (8, 4, 1)) -> Changes:
    """The changes for measure(): each head with scores from queries and keys of so many bits, and
    with its sums of values in so many bits.

    Raises UserError for linear attention and sinks, which have no such scores.
    """
    config = model.config
    by_content = any(pattern.by_content or pattern.n_features for pattern in config.patterns)
    if config.attention_sinks or config.positions in BIASES or by_content:
        raise UserError(
            "scores can be rounded only without sinks, ALiBi, relative positions, linear attention "
            "and choice by content"
        )
    changes: Changes = {}
    for layer, block in enumerate(model.blocks):
        for kind, change in (("scores", rounded_scores), ("sums", rounded_sums)):
            for head in range(block.attention.n_heads):
                name = f"blocks.{layer}.attention.{kind}.{head}"
                for n in bits:
                    changes[name, n] = partial(change, model, layer, head, n)
    return changes


def stored_bytes(matrices: tuple[Linear, ...], bits: int) -> int:
    """Bytes of matrices in 8 or 4 bits, with their scales."""
    groups = sum(linear.out_features * -(-linear.in_features // GROUP) for linear in matrices)
    return groups * (GROUP * bits // 8 + SCALE_BYTES)


def check_budget(model: Thinker, bits_per_weight: float) -> None:
    """Raise UserError if even 4 bits for all matrices do not fit a budget."""
    least = mean_bits(model, dict.fromkeys(fused_matrices(model), 4))
    if bits_per_weight < least:
        raise UserError(
            f"--budget {bits_per_weight:g} is too small: 4 bits and the scales take "
            f"{least:.2f} per weight"
        )


def assign_bits(model: Thinker, costs: list[Cost], bits_per_weight: float) -> dict[str, int]:
    """Bits of each matrix, 4 or 8, that fit the mean `bits_per_weight`, scales included.

    8 bits go to the matrices where they lower the loss most per byte. Raises UserError if even 4
    bits do not fit.
    """
    check_budget(model, bits_per_weight)
    matrices = fused_matrices(model)
    loss = {(cost.name, cost.bits): cost.loss for cost in costs}
    more_bytes = {}  # that 8 bits take instead of 4
    gain = {}  # nats per byte
    least_bytes = 0
    for name, linears in matrices.items():
        n_bytes = stored_bytes(linears, 4)
        least_bytes += n_bytes
        more_bytes[name] = stored_bytes(linears, 8) - n_bytes
        gain[name] = (loss[name, 4] - loss[name, 8]) / more_bytes[name]
    left = bits_per_weight * _n_weights(matrices) / 8 - least_bytes
    chosen = dict.fromkeys(matrices, 4)
    for name in sorted(matrices, key=gain.__getitem__, reverse=True):
        if gain[name] > 0 and more_bytes[name] <= left:
            chosen[name] = 8
            left -= more_bytes[name]
    return chosen


@contextlib.contextmanager
def rounded_model(model: Thinker, bits: dict[str, int]) -> Iterator[None]:
    """Context manager: all matrices have rounded weights, each with its own bits."""
    with contextlib.ExitStack() as stack:
        for name, matrices in fused_matrices(model).items():
            stack.enter_context(rounded(matrices, bits[name]))
        yield


def mean_bits(model: Thinker, bits: dict[str, int]) -> float:
    """Bits per weight of an assignment, scales included."""
    matrices = fused_matrices(model)
    n_bytes = sum(stored_bytes(matrices[name], n) for name, n in bits.items())
    return 8 * n_bytes / _n_weights(matrices)


def _n_weights(matrices: dict[str, tuple[Linear, ...]]) -> int:
    """The number of weights in all matrices."""
    n_weights = 0
    for linears in matrices.values():
        n_weights += sum(linear.weight.numel() for linear in linears)
    return n_weights
