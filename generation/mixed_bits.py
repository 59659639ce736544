"""Bits per weight: 8 or 4 for all matrices, or a file with those of each matrix (scripts/sensitivity.py writes it)."""

import json
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write

# Bits of all matrices, or of each by its name in matrix_names(); None: not quantized.
Bits = int | dict | None
CHOICES = (8, 4)


def matrix_names(n_layers: int) -> list[str]:
    """Names of the matrices that inference reads as one, as they have the same input, and of the LM head."""
    parts = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    return [*(f"blocks.{layer}.{part}" for layer in range(n_layers) for part in parts), "lm_head"]


def check_bits(bits: Bits, n_layers: int) -> None:
    """Raise UserError unless `bits` can be used for a model of so many layers."""
    if not isinstance(bits, dict):
        if bits not in (None, *CHOICES):
            raise UserError(f"bits is {bits}; use 8 or 4, or None for weights in `dtype`")
        return
    names = matrix_names(n_layers)
    if wrong := [name for name in names if name not in bits] or [
        name for name in bits if name not in names
    ]:
        problem = "has no bits for" if wrong[0] in names else "names"
        raise UserError(
            f"the assignment {problem} {wrong[0]}; use one that was made for this model"
        )
    for name, value in bits.items():
        if value not in CHOICES or isinstance(value, bool):
            raise UserError(f"the assignment gives {name} {value!r} bits; use 8 or 4")


def describe_bits(bits: Bits, cache_bits: int | None, *more: str) -> str:
    """Such as "8-bit weights, 4-bit cache, fp32"; `more` comes last."""
    words = [] if bits is None else [f"{4 if isinstance(bits, dict) else bits}-bit weights"]
    if isinstance(bits, dict):
        words.append(f"{sum(value == 8 for value in bits.values())} of {len(bits)} matrices 8-bit")
    if cache_bits is not None:
        words.append(f"{cache_bits}-bit cache")
    return ", ".join([*words, *more])


def write_bits(path: Path, bits: dict[str, int], facts: dict[str, Any]) -> None:
    """Write an assignment, beside `facts` for readers."""
    atomic_write(path, json.dumps(facts | {"bits": bits}, indent=1) + "\n")
