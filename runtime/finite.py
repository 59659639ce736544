"""Checks for non-finite numbers (NaN, infinity) in weights, outputs and JSON."""

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinker.runtime.errors import RunError


@torch.no_grad()
def check_weights(named_tensors: Iterable[tuple[str, Tensor]], source: Any) -> None:
    """Raise RunError if a weight is not finite. Checks sums, which need one pass over the memory and no copy."""
    for name, tensor in named_tensors:
        if tensor.is_floating_point() and not math.isfinite(tensor.sum(dtype=torch.float64).item()):
            problem = "training diverged or the file is damaged; use an earlier checkpoint"
            raise RunError(f"{source}: {name} has non-finite weights: {problem}")


def check_computed(values: Iterable[float]) -> None:
    """Raise RunError if an output of a model is not finite."""
    if not all(map(math.isfinite, values)):
        raise RunError(
            "the model computes non-finite values: its weights are damaged or too large for this precision; "
            "use --precision fp32 or an earlier checkpoint"
        )


def finite_json(value: Any) -> str:
    """The value as ASCII JSON, which every terminal can show. Raises RunError if a number is not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise RunError(f"cannot write a non-finite result as JSON: {error}") from error
