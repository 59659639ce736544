"""Position encodings: rotary embeddings (RoPE), ALiBi and sinusoidal embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from thinker.runtime.errors import UserError, did_you_mean

TYPES = ("linear", "dynamic", "yarn", "llama3")
MAX_TABLE_LEN = 1 << 14  # positions; longer passes compute their angles without a table
MIN_NUMBER, MAX_NUMBER = 1e-9, 1e9  # of any parameter; wider than useful, and safe from overflow
KINDS = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
Rotation = (
    tuple[Tensor, Tensor] | None
)  # (cos, cos) and (−sin, sin) of the positions; None: not rotated


def _parameter(*types: str, default: Any = None, minimum: float = MIN_NUMBER) -> Any:
    """Declare a parameter that only these scaling types use."""
    return field(default=None, metadata={"types": types, "default": default, "minimum": minimum})


@dataclass
class RopeScaling:
    """RoPE scaling for texts longer than in pretraining, as in transformers. Raises UserError for
    invalid values."""

    type: str
    factor: float = _parameter(*TYPES, minimum=1)
    original_max_seq_len: int | None = _parameter(
        "dynamic", "yarn", "llama3", minimum=1
    )  # in pretraining
    beta_fast: float | None = _parameter(
        "yarn", default=32.0
    )  # pairs with more rotations than this keep their angles
    beta_slow: float | None = _parameter("yarn", default=1.0)  # pairs with fewer are divided
    attention_factor: float | None = _parameter(
        "yarn"
    )  # factor on cos and sin; default: attention_scaling
    mscale: float | None = _parameter("yarn")
    mscale_all_dim: float | None = _parameter("yarn")
    truncate: bool | None = _parameter(
        "yarn", default=True
    )  # round the ramp outward to whole pairs
    low_freq_factor: float | None = _parameter("llama3", default=1.0)  # like beta_slow
    high_freq_factor: float | None = _parameter("llama3", default=4.0)  # like beta_fast

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            hint = did_you_mean(str(self.type), TYPES)
            raise UserError(
                f"model.rope_scaling.type is {self.type!r}; choose from: {', '.join(TYPES)}{hint}"
            )
        for parameter in fields(self)[1:]:
            value, rule, key = (
                getattr(self, parameter.name),
                parameter.metadata,
                f"model.rope_scaling.{parameter.name}",
            )
            kind = parameter.type.split()[0]
            types, wanted = KINDS[kind]
            if self.type not in rule["types"]:
                if value is not None:
                    raise UserError(f"{key} has no effect with type {self.type}; remove it")
            elif value is None and rule["minimum"] != 1:  # parameters with minimum 1 are required
                setattr(self, parameter.name, rule["default"])
            # Compared by type(), because True is not a number here.
            elif type(value) not in types or (
                kind != "bool" and not rule["minimum"] <= value <= MAX_NUMBER
            ):
                limits = "" if kind == "bool" else f" from {rule['minimum']:g} to {MAX_NUMBER:g}"
                raise UserError(
                    f"{key} is {value!r}; with type {self.type} it must be {wanted}{limits}"
                )
        for high, low in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            high_value, low_value = getattr(self, high), getattr(self, low)
            if high_value is not None and high_value <= low_value:
                raise UserError(
                    f"model.rope_scaling.{high} is {high_value}; it must be above {low} = "
                    f"{low_value}"
                )
        has_mscale = self.mscale is not None
        if has_mscale != (self.mscale_all_dim is not None) or (
            has_mscale and self.attention_factor is not None
        ):
            raise UserError(
                "model.rope_scaling: set mscale and mscale_all_dim together, or only "
                "attention_factor"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeScaling:
        """Create from a config or file; the inverse of dataclasses.asdict()."""
        if not isinstance(values, dict):
            raise UserError(
                f"model.rope_scaling is {values!r}; use a mapping such as "
                f"{{type: linear, factor: 4}}"
            )
        known = [parameter.name for parameter in fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(
                    f"model.rope_scaling has an unknown key "
                    f"{name!r}{did_you_mean(str(name), known)}"
                )
        return cls(**{"type": None, **values})

    @property
    def attention_scaling(self) -> float:
        """Factor on cos and sin, and squared on scores, with which YaRN sharpens attention over
        longer texts."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(self.factor)  # DeepSeek's quotient; the paper has 1 + growth
        return (1 + (self.mscale or 1) * growth) / (1 + (self.mscale_all_dim or 0) * growth)

    def yarn_correction_range(self, head_dim: int, theta: float) -> tuple[float, float]:
        """First and last pair of the ramp. Faster pairs keep their angles; those of slower pairs
        are divided."""
        low, high = 1.0, 0.0
        if theta > 1:
            rotations = self.original_max_seq_len / (
                2 * math.pi
            )  # of the fastest pair in the original length
            low = head_dim / 2 * math.log(rotations / self.beta_fast, theta)
            high = head_dim / 2 * math.log(rotations / self.beta_slow, theta)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = (
                max(low, 0),
                min(high, head_dim - 1),
            )  # not D/2 − 1, to match the paper's code
        if low > high:  # the ramp would run backward and keep the angles of slow pairs
            lengths = (
                f"original_max_seq_len {self.original_max_seq_len} and model.rope_theta {theta}"
            )
            raise UserError(
                f"model.rope_scaling of type yarn has no effect with {lengths}; use linear"
            )
        return low, high if high > low else high + 0.001


class Rope(nn.Module):
    """Rotary embeddings (Su et al. 2021, arXiv:2104.09864), rotate-half as in LLaMA, with tables
    built on demand."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.attention_scaling = 1.0 if scaling is None else scaling.attention_scaling
        is_dynamic = scaling is not None and scaling.type == "dynamic"
        self.max_static_len = (
            scaling.original_max_seq_len if is_dynamic else math.inf
        )  # longer passes use other angles
        self.frequencies()  # raise errors now, not in the first pass
        self.table: tuple[Tensor, Tensor, float] | None = (
            None  # with its stretch; replaced as a whole (threads)
        )

    def forward(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (−sin, sin) at `positions`, (T,) or (B, T), all below `end`: (T, D) or (B,
        1, T, D) each."""
        # Factor by which the slowest pair is slowed down at this length.
        stretch = (
            1.0
            if end <= self.max_static_len
            else self.scaling.factor * (end / self.max_static_len - 1) + 1
        )
        table = self.table
        table_len = len(table[0]) if table is not None and table[2] == stretch else 0
        if end > max(
            table_len, MAX_TABLE_LEN, positions.shape[-1]
        ):  # keeps the table small for endless texts
            cos, sin = self._cos_sin(positions, stretch)
        else:
            if table_len < end or table[0].device != positions.device:
                table_positions = torch.arange(max(end, 2 * table_len), device=positions.device)
                self.table = table = (*self._cos_sin(table_positions, stretch), stretch)
            cos, sin = table[0][positions], table[1][positions]
        cos, sin = cos.to(dtype), sin.to(dtype)
        return (
            (cos, sin) if positions.dim() == 1 else (cos.unsqueeze(1), sin.unsqueeze(1))
        )  # (B, 1, T, D)

    def check_growth(self, end: int) -> None:
        """Raise UserError if dynamic scaling would change the angles of cached keys or masked
        documents at `end`."""
        if end > self.max_static_len:
            raise UserError(
                f"model.rope_scaling of type dynamic limits a cache or masked documents to "
                f"original_max_seq_len = "
                f"{self.max_static_len} positions, but got {end}; use yarn or linear"
            )

    def frequencies(self, stretch: float = 1.0) -> Tensor:
        """Radians per position of each pair, (D/2,) in float64, fastest first."""
        pairs, scaling = (
            torch.arange(self.head_dim // 2, dtype=torch.float64, device="cpu"),
            self.scaling,
        )
        plain = self.theta ** (-2 * pairs / self.head_dim)
        if scaling is None:
            return plain
        if (
            scaling.type == "dynamic"
        ):  # emozilla, bloc97 2023: the base becomes theta · stretch^(D / (D − 2))
            return plain * stretch ** (-pairs / max(self.head_dim / 2 - 1, 1))
        kept = torch.zeros_like(
            pairs
        )  # fraction of each pair's angles that is not divided; linear (arXiv:2306.15595)
        if (
            scaling.type == "yarn"
        ):  # arXiv:2309.00071: fast pairs keep all, slow pairs none, a ramp between
            low, high = scaling.yarn_correction_range(self.head_dim, self.theta)
            kept = ((high - pairs) / (high - low)).clamp(0, 1)
        elif (
            scaling.type == "llama3"
        ):  # arXiv:2407.21783 and its code: a ramp over rotations, not pairs
            rotations = scaling.original_max_seq_len * plain / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / scaling.factor)

    def _cos_sin(self, positions: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
        """Positions (...) -> (cos, cos) and (−sin, sin), (..., D) each."""
        device = positions.device
        float64_device = (
            torch.device("cpu") if device.type == "mps" else device
        )  # MPS has no float64
        # In fp32 the angles of late positions would be too coarse.
        positions = positions.to(float64_device, torch.float64)
        angles = positions[..., None] * self.frequencies(stretch).to(float64_device)  # (..., D/2)
        cos, sin = (
            (self.attention_scaling * angles.cos()).float(),
            (self.attention_scaling * angles.sin()).float(),
        )
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


def sinusoidal_embedding(positions: Tensor, width: int) -> Tensor:
    """Sinusoidal embeddings (arXiv:1706.03762): sin, then cos at wavelengths 2π to 10,000·2π, (...,
    T, width)."""
    rates = torch.exp(
        torch.arange(0, width, 2, device=positions.device) * (-math.log(10000.0) / width)
    )  # (width / 2,)
    angles = positions[..., None] * rates  # (..., T, width / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[..., :width]
