"""RoPE scaling: other angles for texts longer than in pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from thinker.runtime.errors import UserError, did_you_mean

TYPES = ("linear", "dynamic", "yarn", "llama3")
MIN_NUMBER, MAX_NUMBER = 1e-9, 1e9  # of any parameter; wider than useful, and safe from overflow
KINDS = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}


def _parameter(*types: str, default: Any = None, minimum: float = MIN_NUMBER) -> Any:
    """Declare a parameter that only these scaling types use."""
    return field(default=None, metadata={"types": types, "default": default, "minimum": minimum})


@dataclass
class RopeScaling:
    """RoPE scaling for texts longer than in pretraining, as in transformers. Raises UserError for
    invalid values."""

    type: str
    factor: float = _parameter(*TYPES, minimum=1)
    # In pretraining.
    original_max_seq_len: int | None = _parameter("dynamic", "yarn", "llama3", minimum=1)
    # Pairs with more rotations than this keep their angles.
    beta_fast: float | None = _parameter("yarn", default=32.0)
    # Pairs with fewer are divided.
    beta_slow: float | None = _parameter("yarn", default=1.0)
    # Factor on cos and sin; default: attention_scaling.
    attention_factor: float | None = _parameter("yarn")
    mscale: float | None = _parameter("yarn")
    mscale_all_dim: float | None = _parameter("yarn")
    # Round the ramp outward to whole pairs.
    truncate: bool | None = _parameter("yarn", default=True)
    low_freq_factor: float | None = _parameter("llama3", default=1.0)  # like beta_slow
    high_freq_factor: float | None = _parameter("llama3", default=4.0)  # like beta_fast

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            hint = did_you_mean(str(self.type), TYPES)
            raise UserError(
                f"model.rope_scaling.type is {self.type!r}; choose from: {', '.join(TYPES)}{hint}"
            )
        for parameter in fields(self)[1:]:
            kind = parameter.type.split()[0]
            self._check_parameter(parameter.name, kind, **parameter.metadata)
        self._check_order("beta_fast", "beta_slow")
        self._check_order("high_freq_factor", "low_freq_factor")
        has_mscale = self.mscale is not None
        has_both = has_mscale == (self.mscale_all_dim is not None)
        if not has_both or (has_mscale and self.attention_factor is not None):
            raise UserError(
                "model.rope_scaling: set mscale and mscale_all_dim together, or only "
                "attention_factor"
            )

    def _check_parameter(
        self, name: str, kind: str, types: tuple[str, ...], default: Any, minimum: float
    ) -> None:
        """Check one parameter of _parameter(), or set its default. `kind`: a key of KINDS."""
        key = f"model.rope_scaling.{name}"
        value = getattr(self, name)
        if self.type not in types:
            if value is not None:
                raise UserError(f"{key} has no effect with type {self.type}; remove it")
            return
        if value is None and minimum != 1:  # parameters with minimum 1 are required
            setattr(self, name, default)
            return
        accepted, wanted = KINDS[kind]
        is_valid = type(value) in accepted  # not isinstance(), because True is not a number here
        if kind != "bool":
            wanted += f" from {minimum:g} to {MAX_NUMBER:g}"
            is_valid = is_valid and minimum <= value <= MAX_NUMBER
        if not is_valid:
            raise UserError(f"{key} is {value!r}; with type {self.type} it must be {wanted}")

    def _check_order(self, high: str, low: str) -> None:
        high_value = getattr(self, high)
        low_value = getattr(self, low)
        if high_value is not None and high_value <= low_value:
            raise UserError(
                f"model.rope_scaling.{high} is {high_value}; it must be above {low} = {low_value}"
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
            # Of the fastest pair in the original length.
            rotations = self.original_max_seq_len / (2 * math.pi)
            low = head_dim / 2 * math.log(rotations / self.beta_fast, theta)
            high = head_dim / 2 * math.log(rotations / self.beta_slow, theta)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low = max(low, 0)
            high = min(high, head_dim - 1)  # not D/2 − 1, to match the paper's code
        if low > high:  # the ramp would run backward and keep the angles of slow pairs
            lengths = (
                f"original_max_seq_len {self.original_max_seq_len} and model.rope_theta {theta}"
            )
            raise UserError(
                f"model.rope_scaling of type yarn has no effect with {lengths}; use linear"
            )
        if high == low:
            high += 0.001
        return low, high
