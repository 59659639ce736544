"""Check values: the types of what a user passes, and that numbers are finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from thinker.runtime.errors import RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

MAX_VALUE_CHARS = 500
TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}


def describe(value: Any) -> str:
    """Describe a value in a message: by its repr if that is short, otherwise by its type."""
    if isinstance(value, (*TYPE_NAMES, list, tuple, dict)):
        text = repr(value)
        if len(text) <= MAX_VALUE_CHARS and "\n" not in text:
            return text
    return f"a {type(value).__name__}"


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for a value that does not match the type hint of its name."""
    for name, hint in hints.items():
        types = get_args(hint) or (hint,)  # a union has arguments
        if name in values and not _has_type(values[name], types):
            wanted = " or ".join(TYPE_NAMES.get(each, f"a {each.__name__}") for each in types)
            raise UserError(f"{prefix}{name} is {describe(values[name])}; it must be {wanted}")


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types. An int is also a float, but a bool is no int."""
    if type(value) in types:
        return True
    if isinstance(value, bool):
        return False
    if type(value) is int and float in types:
        return True
    return isinstance(value, types)


def divisors(n: int) -> list[int]:
    """Divisors of n in increasing order: the choices where a number must divide another."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    large = [n // d for d in reversed(small) if d * d != n]
    return small + large


def check_weights(named_tensors: Iterable[tuple[str, Tensor]], source: Any) -> None:
    """Raise RunError if a weight is not finite."""
    # Imported here, as commands check their flags before they load torch.
    import torch

    for name, tensor in named_tensors:
        if not tensor.is_floating_point():
            continue
        # A sum needs one pass over the memory and no copy. If it overflows, one in fp64 does not,
        # but takes thirty times as long.
        weights = tensor.detach()
        total = weights.sum().item()
        if not math.isfinite(total):
            total = weights.sum(dtype=torch.float64).item()
        if not math.isfinite(total):
            problem = "training diverged or the file is damaged; use an earlier checkpoint"
            raise RunError(f"{source}: {name} has non-finite weights: {problem}")


def check_computed(values: Iterable[float]) -> None:
    """Raise RunError if an output of a model is not finite."""
    if not all(math.isfinite(value) for value in values):
        raise RunError(
            "the model computes non-finite values: its weights are damaged or too large for this "
            "precision; use --precision fp32 or an earlier checkpoint"
        )


def finite_json(value: Any) -> str:
    """The value as ASCII JSON, which every terminal can show. Raises RunError if not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise RunError(f"cannot write a non-finite result as JSON: {error}") from error
