"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the rotate-half convention of LLaMA and Qwen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from thinker.runtime.errors import UserError, did_you_mean

TYPES = ("linear", "dynamic", "yarn", "llama3")
MAX_TABLE_LEN = 1 << 14  # positions; longer passes compute their own
SMALLEST, LARGEST = 1e-9, 1e9  # of any number of a scaling: far beyond use, and nothing overflows


def _read_by(*types: str, default: Any = None, least: float = SMALLEST) -> Any:
    """A parameter of these types of scaling alone."""
    return field(default=None, metadata={"types": types, "default": default, "least": least})


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is stretched over texts longer than those of the pretraining; parameters and angles are transformers'.

    | type | what becomes of the angles |
    |---|---|
    | linear | all are divided by `factor` (Chen et al. 2023, arXiv:2306.15595) |
    | dynamic | the base grows with a pass's length beyond the original, even at factor 1 (emozilla, bloc97 2023) |
    | yarn | fast pairs keep theirs, slow ones are divided, a ramp between (Peng et al. 2023, arXiv:2309.00071) |
    | llama3 | the same with a ramp over turns instead of pairs (Llama 3.1, arXiv:2407.21783, and its code) |

    What is left at None gets its default. Raises UserError on what cannot be, and on what the type does not read.
    """

    type: str
    factor: float = _read_by(*TYPES, least=1)
    original_max_seq_len: int | None = _read_by("dynamic", "yarn", "llama3", least=1)  # the length of the pretraining
    beta_fast: float | None = _read_by("yarn", default=32.0)  # turns in that length from which angles are kept
    beta_slow: float | None = _read_by("yarn", default=1.0)  # turns up to which they are divided
    attention_factor: float | None = _read_by("yarn")  # what cos and sin are multiplied by; None: see attention_scaling
    mscale: float | None = _read_by("yarn")
    mscale_all_dim: float | None = _read_by("yarn")
    truncate: bool | None = _read_by("yarn", default=True)  # widen the ramp to whole pairs
    low_freq_factor: float | None = _read_by("llama3", default=1.0)  # as beta_slow
    high_freq_factor: float | None = _read_by("llama3", default=4.0)  # as beta_fast

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            hint = did_you_mean(str(self.type), TYPES)
            raise UserError(f"model.rope_scaling.type is {self.type!r}; possible: {', '.join(TYPES)}{hint}")
        for parameter in fields(self)[1:]:
            name, value, rule = parameter.name, getattr(self, parameter.name), parameter.metadata
            kind, least = parameter.type.split()[0], rule["least"]
            kinds = {"int": (int,), "float": (int, float), "bool": (bool,)}[kind]  # a bool is no number
            if self.type not in rule["types"]:
                if value is not None:
                    raise UserError(f"model.rope_scaling.{name} is not read with type {self.type}; leave it out")
            elif value is None and least < 1:
                object.__setattr__(self, name, rule["default"])
            elif type(value) not in kinds or (kind != "bool" and not least <= value <= LARGEST):
                number = f"a {'whole ' * (kind == 'int')}number from {least:g} to {LARGEST:g}"
                right = "true or false" if kind == "bool" else number
                raise UserError(f"model.rope_scaling.{name} is {value!r}; with type {self.type} it must be {right}")
        for fast, slow in (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor")):
            more, less = getattr(self, fast), getattr(self, slow)
            if more is not None and more <= less:
                raise UserError(f"model.rope_scaling.{fast} ({more}) must be greater than {slow} ({less})")
        given = [value is not None for value in (self.attention_factor, self.mscale, self.mscale_all_dim)]
        if given[1] != given[2] or (given[0] and given[1]):
            raise UserError("model.rope_scaling takes mscale and mscale_all_dim together, or attention_factor alone")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeScaling:
        """From a config or a file, where None is as good as left out; dataclasses.asdict is the inverse."""
        if not isinstance(values, dict):
            raise UserError(f"model.rope_scaling is {values!r}; it must be a table such as {{type: linear, factor: 4}}")
        known = [parameter.name for parameter in fields(cls)]
        for name in values:
            if name not in known:
                raise UserError(f"model.rope_scaling has no key {name!r}{did_you_mean(str(name), known)}")
        return cls(**{"type": None, **values})

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by, and so scores by its square: the more YaRN sees, the sharper."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 0.1 * math.log(self.factor)  # the quotient is DeepSeek's, the paper has 1 + grown
        return (1 + (self.mscale or 1) * grown) / (1 + (self.mscale_all_dim or 0) * grown)

    def yarn_correction_range(self, head_dim: int, theta: float) -> tuple[float, float]:
        """The pairs between which YaRN goes over from angles kept to angles divided; the first is the faster one."""
        low, high = 1.0, 0.0
        if theta > 1:
            turns = self.original_max_seq_len / (2 * math.pi)  # of the fastest pair within the original length
            low, high = (head_dim / 2 * math.log(turns / beta, theta) for beta in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)  # not D/2 − 1: so the paper's own code, and all others'
        if low > high:  # where the formula would turn round and keep the angles of pairs that are to be divided
            raise UserError(
                f"model.rope_scaling of type yarn finds no pair to begin with at original_max_seq_len "
                f"{self.original_max_seq_len} and model.rope_theta {theta}; use linear"
            )
        return low, high if high > low else high + 0.001


class Rope(nn.Module):
    """Tables of cos and sin by absolute position, made on demand; they are neither parameters nor saved."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.attention_scaling = 1.0 if scaling is None else scaling.attention_scaling
        # A pass longer than this has angles of its own.
        self.max_static_len = scaling.original_max_seq_len if scaling and scaling.type == "dynamic" else math.inf
        if scaling and scaling.type == "yarn":
            scaling.yarn_correction_range(head_dim, theta)  # refuse now rather than in the first pass
        self.table: tuple[Tensor, Tensor] | None = None
        self.stretch = 1.0  # that of the table

    def forward(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` ((T,) or (B, T)), all below `end`, which the host knows without asking the device.

        Returns two tensors (T, D) or (B, 1, T, D), to be broadcast over (B, H, T, D): cos twice; −sin, sin.
        """
        # How much slower the slowest pair turns in a pass of this length.
        stretch = 1.0 if end <= self.max_static_len else self.scaling.factor * (end / self.max_static_len - 1) + 1
        held = len(self.table[0]) if self.table is not None and self.stretch == stretch else 0
        if end > max(held, MAX_TABLE_LEN, positions.shape[-1]):  # a text without end shall have no table without end
            cos, sin = self._cos_sin(positions, stretch)
        else:
            if held < end or self.table[0].device != positions.device:
                every = torch.arange(max(end, 2 * held), device=positions.device)
                self.table, self.stretch = self._cos_sin(every, stretch), stretch
            cos, sin = (table[positions] for table in self.table)
        cos, sin = cos.to(dtype), sin.to(dtype)
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D)
        return cos, sin

    def check_growth(self, end: int) -> None:
        """Raise UserError where `end` positions, in a cache or of several documents, would need several angles each."""
        if end > self.max_static_len:
            raise UserError(
                "model.rope_scaling of type dynamic turns every key anew at every length beyond original_max_seq_len "
                f"({self.max_static_len}): no cache and no isolated documents go on to {end}; use yarn or linear"
            )

    def frequencies(self, stretch: float = 1.0) -> Tensor:
        """Radians a position by pair, (D/2,) in float64, the fastest first."""
        pairs, scaling = torch.arange(self.head_dim // 2, dtype=torch.float64), self.scaling
        plain = self.theta ** (-2 * pairs / self.head_dim)
        if scaling is None:
            return plain
        if scaling.type == "dynamic":  # the same as a base of theta · stretch^(D / (D − 2))
            return plain * stretch ** (-pairs / max(self.head_dim / 2 - 1, 1))
        kept = torch.zeros_like(pairs)  # how much of each pair's angles is not divided, 0 to 1
        if scaling.type == "yarn":
            low, high = scaling.yarn_correction_range(self.head_dim, self.theta)
            kept = ((high - pairs) / (high - low)).clamp(0, 1)
        elif scaling.type == "llama3":
            turns = scaling.original_max_seq_len * plain / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / scaling.factor)

    def _cos_sin(self, positions: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
        """cos twice; −sin, sin: of positions (...) -> (..., D) each."""
        device = positions.device
        where = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        # In fp32 the angle of a far position would lose its fraction.
        angles = positions.to(where, torch.float64)[..., None] * self.frequencies(stretch).to(where)  # (..., D/2)
        cos, sin = (self.attention_scaling * angles.cos()).float(), (self.attention_scaling * angles.sin()).float()
        return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def apply_rotary_emb(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by the angle of its position; rope None is no rotation. x: (B, H, T, D)."""
    if rope is None:
        return x
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
