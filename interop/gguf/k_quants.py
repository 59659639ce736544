"""K-quants: the data types q4_k, q5_k and q6_k of GGUF files, in blocks of 256 weights of a row.

q4_k and q5_k have 8 groups of 32 weights in a block. A weight is `scale * level - minimum`, with a
level of 4 or 5 bits. The scales and minimums of the groups are integers of 6 bits, which the two
f16 numbers of the block multiply.

q6_k has 16 groups of 16 weights in a block. A weight is `scale * level`, with a level from -32 to
31. The scales are integers of 8 bits, which the f16 number of the block multiplies.

The format is that of llama.cpp. The search for scales is ours: it alternates between the nearest
levels for a scale and the least squares for these levels, from several first scales.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # weights of a row that share f16 numbers
K_BITS = {"q4_k": 4, "q5_k": 5, "q6_k": 6}
BLOCKS_PER_STEP = 4096  # which bounds the memory of a step

# The first scales, as multiples of the one with which the levels just cover all weights.
FIRST_SCALES = (0.85, 0.87, 0.89, 0.91, 0.93, 0.95, 0.97, 0.99, 1.01, 1.03, 1.05)
N_REFINEMENTS = 2


def quantize_k(values: Tensor, dtype: str) -> np.ndarray:
    """Quantize fp32 rows (R, D) to bytes (R, n). D is a multiple of BLOCK.

    dtype: q4_k, q5_k or q6_k. Overflow of the f16 numbers is stored as infinity.
    """
    blocks = values.reshape(-1, BLOCK)
    stored = []
    for part in blocks.split(BLOCKS_PER_STEP):
        if dtype == "q6_k":
            stored.append(_quantize_symmetric(part))
        else:
            stored.append(_quantize_with_minimum(part, K_BITS[dtype]))
    return np.concatenate(stored).reshape(len(values), -1)


def _quantize_with_minimum(blocks: Tensor, bits: int) -> np.ndarray:
    """Quantize blocks (N, 256) to q4_k or q5_k, (N, bytes)."""
    largest_level = 2**bits - 1
    groups = blocks.unflatten(1, (8, 32))  # (N, 8, 32)
    scales, minimums = _search(groups, largest_level)  # (N, 8) each

    d = _f16_at_least(scales.amax(1) / 63)  # (N,)
    d_minimum = _f16_at_least(minimums.amax(1) / 63)
    scale_levels = _levels(scales, d[:, None], 0, 63)  # (N, 8)
    minimum_levels = _levels(minimums, d_minimum[:, None], 0, 63)
    scales = d[:, None] * scale_levels
    minimums = d_minimum[:, None] * minimum_levels
    levels = _levels(groups + minimums[..., None], scales[..., None], 0, largest_level)

    levels_stored = _bytes(levels)  # (N, 8, 32)
    pairs = (levels_stored & 15).reshape(-1, 4, 2, 32)
    parts = [
        _f16_bytes(d),
        _f16_bytes(d_minimum),
        _pack_6_bits(_bytes(scale_levels), _bytes(minimum_levels)),
    ]
    if bits == 5:
        fifth = (levels_stored >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(fifth, axis=1))  # (N, 32): a bit for each group
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128))
    return np.concatenate(parts, axis=1)


def _quantize_symmetric(blocks: Tensor) -> np.ndarray:
    """Quantize blocks (N, 256) to q6_k, (N, bytes)."""
    groups = blocks.unflatten(1, (16, 16))  # (N, 16, 16)
    scales = _search_symmetric(groups)  # (N, 16)
    # The scale of the largest magnitude becomes -128, since 128 does not exist.
    peak = scales.gather(1, scales.abs().argmax(1, keepdim=True))[:, 0]  # (N,)
    d = -peak.sign() * _f16_at_least(peak.abs() / 128)
    scale_levels = _levels(scales, d[:, None], -128, 127)  # (N, 16)
    scales = d[:, None] * scale_levels
    levels = _levels(groups, scales[..., None], -32, 31)

    # Levels of 32 weights: two halves of the block, the two nibbles of a byte, two runs of bytes.
    shifted = _bytes(levels + 32).reshape(-1, 2, 2, 2, 32)
    low = shifted & 15
    low = low[:, :, 0] | low[:, :, 1] << 4  # (N, 2, 2, 32)
    places = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (shifted >> 4).reshape(-1, 2, 4, 32) << places
    parts = [
        low.reshape(-1, 128),
        np.bitwise_or.reduce(high, axis=2).reshape(-1, 64),
        scale_levels.to(torch.int8).numpy().view(np.uint8),
        _f16_bytes(d),
    ]
    return np.concatenate(parts, axis=1)


def _search(groups: Tensor, largest_level: int) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each group (..., n), both at least 0.

    They minimize the squared error, in which large weights count more.
    """
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    widest = (groups.amax(-1, keepdim=True) - low) / largest_level

    def fit(levels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted least squares of scale and minimum."""
        total = weights.sum(-1, keepdim=True)
        sum_l = (weights * levels).sum(-1, keepdim=True)
        sum_ll = (weights * levels.square()).sum(-1, keepdim=True)
        sum_x = (weights * groups).sum(-1, keepdim=True)
        sum_lx = (weights * levels * groups).sum(-1, keepdim=True)
        determinant = total * sum_ll - sum_l.square()
        fitted = (total * sum_lx - sum_x * sum_l) / determinant
        minimum = (sum_l * sum_lx - sum_ll * sum_x) / determinant
        # Where the minimum would be below 0, it is 0.
        fitted = torch.where(minimum < 0, sum_lx / sum_ll, fitted)
        is_fitted = fitted.isfinite() & (fitted > 0)  # not if all levels are equal
        scale = torch.where(is_fitted, fitted, scale)
        minimum = torch.where(is_fitted, minimum.clamp(min=0), -low)
        return scale, minimum

    def restore(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        levels = _levels(groups + minimum, scale, 0, largest_level)
        return levels, scale * levels - minimum

    first = [(widest * f, -low) for f in FIRST_SCALES]
    return _best(groups, weights, first, fit, restore)


def _search_symmetric(groups: Tensor) -> Tensor:
    """The scale of each group (..., n), which minimizes the squared error as _search() does.

    The weight of the largest magnitude has the level -32 or one near it.
    """
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    none = torch.zeros_like(peak)

    def fit(levels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        sum_ll = (weights * levels.square()).sum(-1, keepdim=True)
        fitted = (weights * levels * groups).sum(-1, keepdim=True) / sum_ll
        return torch.where(fitted.isfinite(), fitted, scale), none

    def restore(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        levels = _levels(groups, scale, -32, 31)
        return levels, scale * levels

    first = [(peak / -32 * f, none) for f in FIRST_SCALES]
    return _best(groups, weights, first, fit, restore)[0]


def _best(
    groups: Tensor,
    weights: Tensor,
    first: list[tuple[Tensor, Tensor]],
    fit: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    restore: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """The best scale and minimum of each group, without the last dimension.

    first: scales and minimums to begin with. fit: (levels, scale) -> better scale and minimum.
    restore: (scale, minimum) -> the nearest levels, and the weights that they stand for.
    """
    best_scale, best_minimum = first[0]
    least = torch.full_like(best_scale, torch.inf)
    for scale, minimum in first:
        levels, restored = restore(scale, minimum)
        for _ in range(N_REFINEMENTS):
            scale, minimum = fit(levels, scale)
            levels, restored = restore(scale, minimum)
        error = (weights * (restored - groups).square()).sum(-1, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        best_scale = torch.where(is_better, scale, best_scale)
        best_minimum = torch.where(is_better, minimum, best_minimum)
    return best_scale[..., 0], best_minimum[..., 0]


def _levels(values: Tensor, scales: Tensor, smallest: int, largest: int) -> Tensor:
    """The nearest integer multiples of the scales; 0 where a scale is 0."""
    return (values / scales).nan_to_num(0, 0, 0).round().clamp(smallest, largest)


def _f16_at_least(values: Tensor) -> Tensor:
    """The smallest f16 numbers that are not below these, as fp32.

    Nearest numbers could be far too small where f16 has few digits, below 6e-5.
    """
    with np.errstate(over="ignore"):  # an infinity, which our caller finds
        rounded = values.numpy().astype(np.float16)
    above = np.nextafter(rounded, np.float16(np.inf))
    rounded = np.where(rounded.astype(np.float32) < values.numpy(), above, rounded)
    return torch.from_numpy(rounded.astype(np.float32))


def _f16_bytes(values: Tensor) -> np.ndarray:
    """The two bytes of numbers (N,) that f16 represents, (N, 2)."""
    return values.numpy().astype("<f2")[:, None].view(np.uint8)


def _bytes(levels: Tensor) -> np.ndarray:
    return levels.to(torch.uint8).numpy()


def _pack_6_bits(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Pack 8 scales and 8 minimums (N, 8) of 6 bits into 12 bytes (N, 12).

    The first 8 bytes have those of groups 0 to 3, and in their upper two bits those of groups 4 to
    7, whose lower four bits are in the last 4 bytes.
    """
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)
