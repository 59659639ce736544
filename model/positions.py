"""Position encodings: rotary embeddings (RoPE), ALiBi, relative biases and sinusoidal
embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.model.rope_scaling import RopeScaling

MAX_TABLE_LEN = 1 << 14  # positions; longer passes compute their angles without a table
# (cos, cos) and (−sin, sin) of the positions; None: not rotated.
Rotation = tuple[Tensor, Tensor] | None


class Rope(nn.Module):
    """Rotary embeddings (Su et al. 2021, arXiv:2104.09864), rotate-half as in LLaMA, with tables
    built on demand.

    rope_dim: channels that are rotated, as in GPT-NeoX and Phi; None: all. The pairs (i, i + D/2)
    with i < rope_dim/2 are rotated and the others stay, so that kernels need not know about it. An
    import reorders the channels of queries and keys accordingly (interop/families/layouts.py).
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None = None,
        rope_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rope_dim = rope_dim
        if rope_dim is None:
            self.rope_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.attention_scaling = 1.0
        self.max_static_len = math.inf  # longer passes use other angles
        if scaling is not None:
            self.attention_scaling = scaling.attention_scaling
            if scaling.type == "dynamic":
                self.max_static_len = scaling.original_max_seq_len
        self.frequencies()  # raise errors now, not in the first pass
        # cos and sin of the first positions, and their stretch; replaced as a whole, because
        # several threads may use a model.
        self.table: tuple[Tensor, Tensor, float] | None = None

    def forward(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (−sin, sin) at `positions`, (T,) or (B, T), all below `end`: (T, D) or (B,
        1, T, D) each."""
        # Factor by which the slowest pair is slowed down at this length.
        stretch = 1.0
        if end > self.max_static_len:
            stretch = self.scaling.factor * (end / self.max_static_len - 1) + 1
        table = self.table
        table_len = 0
        if table is not None and table[2] == stretch:
            table_len = len(table[0])
        if end > max(table_len, MAX_TABLE_LEN, positions.shape[-1]):
            # A table for an endless text would not stay small.
            cos, sin = self._cos_sin(positions, stretch)
        else:
            if table_len < end or table[0].device != positions.device:
                table_positions = torch.arange(max(end, 2 * table_len), device=positions.device)
                table = (*self._cos_sin(table_positions, stretch), stretch)
                self.table = table
            cos, sin = table[0][positions], table[1][positions]
        cos, sin = cos.to(dtype), sin.to(dtype)
        if positions.dim() == 2:
            return cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D)
        return cos, sin

    def _pair_scaling(self) -> Tensor:
        """The factor on cos and sin of each pair, (D/2,) in float64: 1 if it is not rotated."""
        scaling = torch.ones(self.head_dim // 2, dtype=torch.float64, device="cpu")
        scaling[: self.rope_dim // 2] = self.attention_scaling
        return scaling

    def without_scaling(self, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Tables of forward() for queries and keys that have been scaled before."""
        scaling = self._pair_scaling().repeat(2)  # (D,)
        cos, sin = (table / scaling.to(table.device, torch.float32) for table in tables)
        return cos.to(tables[0].dtype), sin.to(tables[1].dtype)

    def check_growth(self, end: int) -> None:
        """Raise UserError if dynamic scaling would change the angles of cached keys or masked
        documents at `end`."""
        if end > self.max_static_len:
            raise UserError(
                f"model.rope_scaling of type dynamic limits a cache or masked documents to "
                f"original_max_seq_len = {self.max_static_len} positions, but got {end}; use yarn "
                f"or linear"
            )

    def frequencies(self, stretch: float = 1.0) -> Tensor:
        """Radians per position of each pair, (D/2,) in float64, fastest first; 0 if not rotated."""
        n_still = (self.head_dim - self.rope_dim) // 2
        return F.pad(self._rotated_frequencies(stretch), (0, n_still))

    def _rotated_frequencies(self, stretch: float) -> Tensor:
        """Radians per position of each rotated pair, (rope_dim / 2,)."""
        scaling = self.scaling
        width = self.rope_dim
        pairs = torch.arange(width // 2, dtype=torch.float64, device="cpu")
        plain = self.theta ** (-2 * pairs / width)
        if scaling is None:
            return plain
        if scaling.type == "dynamic":
            # emozilla, bloc97 2023: the base becomes theta · stretch^(D / (D − 2)).
            return plain * stretch ** (-pairs / max(width / 2 - 1, 1))
        # Fraction of each pair's angles that is not divided; linear (arXiv:2306.15595).
        kept = torch.zeros_like(pairs)
        if scaling.type == "yarn":
            # arXiv:2309.00071: fast pairs keep all, slow pairs none, a ramp between.
            low, high = scaling.yarn_correction_range(width, self.theta)
            kept = ((high - pairs) / (high - low)).clamp(0, 1)
        elif scaling.type == "llama3":
            # arXiv:2407.21783 and its code: a ramp over rotations, not pairs.
            rotations = scaling.original_max_seq_len * plain / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / scaling.factor)

    def _cos_sin(self, positions: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
        """Positions (...) -> (cos, cos) and (−sin, sin), (..., D) each."""
        device = positions.device
        float64_device = device
        if device.type == "mps":  # which has no float64
            float64_device = torch.device("cpu")
        # In fp32 the angles of late positions would be too coarse.
        positions = positions.to(float64_device, torch.float64)
        angles = positions[..., None] * self.frequencies(stretch).to(float64_device)  # (..., D/2)
        scaling = self._pair_scaling().to(float64_device)
        cos = (scaling * angles.cos()).float()
        sin = (scaling * angles.sin()).float()
        return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def heads_last(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The tables for heads in the order (B, T, H, D): (T, D) or (B, 1, T, D) -> (1 or B, T, 1,
    D)."""
    cos, sin = (table.view(-1, 1, *table.shape[-2:]).transpose(1, 2) for table in rope)
    return cos, sin


def apply_rotary_emb(x: Tensor, rope: Rotation) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of x (..., D) by the angle of its position."""
    if rope is None:
        return x
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def alibi_slopes(n_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi slopes (Press et al. 2022, arXiv:2108.12409): the penalty of each head per position of
    distance, (H,)."""
    power = 1 << (n_heads.bit_length() - 1)
    exponents = [8 * h / power for h in range(1, power + 1)]
    # 2^(−8h/H) if H is a power of two; else the slopes of the power below and every other slope of
    # the power above.
    exponents += [8 * h / (2 * power) for h in range(1, 2 * (n_heads - power) + 1, 2)]
    return torch.tensor([2.0**-e for e in exponents], device=device)


N_BUCKETS = 32
MAX_DISTANCE = 128  # from here on, all distances share the last bucket


def distance_bucket(distance: int) -> int:
    """The bucket of a distance, as in T5 (Raffel et al. 2020, arXiv:1910.10683): one for each below
    half of the buckets, then ever wider ones."""
    n_exact = N_BUCKETS // 2
    if distance < n_exact:
        return distance
    share = math.log(distance / n_exact) / math.log(MAX_DISTANCE / n_exact)
    return min(N_BUCKETS - 1, n_exact + int(share * (N_BUCKETS - n_exact)))


BUCKETS = [distance_bucket(distance) for distance in range(MAX_DISTANCE + 1)]


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distances, which is added to the scores; all layers
    share it.

    weight: (N_BUCKETS, H), zeros at first.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N_BUCKETS, n_heads))

    def forward(self, distance: Tensor) -> Tensor:
        """(T, S) -> (H, T, S), or (B, 1, T, S) -> (B, H, T, S)."""
        buckets = torch.tensor(BUCKETS, device=distance.device)  # (MAX_DISTANCE + 1,)
        by_distance = self.weight[buckets]  # (MAX_DISTANCE + 1, H)
        bias = by_distance[distance.clamp(max=MAX_DISTANCE)]  # (..., T, S, H)
        if distance.dim() == 4:
            bias = bias[:, 0]  # (B, T, S, H)
        return bias.movedim(-1, -3)


def sinusoidal_embedding(positions: Tensor, width: int) -> Tensor:
    """Sinusoidal embeddings (arXiv:1706.03762): sin, then cos at wavelengths 2π to 10,000·2π, (...,
    T, width)."""
    channels = torch.arange(0, width, 2, device=positions.device)
    rates = torch.exp(channels * (-math.log(10000.0) / width))  # (width / 2,)
    angles = positions[..., None] * rates  # (..., T, width / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[..., :width]
