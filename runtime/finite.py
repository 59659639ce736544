"""Numbers that are not finite (NaN, infinity): in weights, in what a model computes, and in JSON, which has none."""

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinker.runtime.errors import RunError


@torch.no_grad()
def check_weights(named_tensors: Iterable[tuple[str, Tensor]], source: Any) -> None:
    """Raise RunError if a weight is not finite. A sum shows it, in one pass over the memory and without a copy."""
    for name, tensor in named_tensors:
        if tensor.is_floating_point() and not math.isfinite(tensor.sum(dtype=torch.float64).item()):
            problem = "the training diverged, or the file is damaged; take an earlier checkpoint"
            raise RunError(f"{source}: {name} has weights that are not finite: {problem}")


def check_computed(values: Iterable[float]) -> None:
    """Raise RunError if one of the numbers that a model computed is not finite."""
    if not all(map(math.isfinite, values)):
        raise RunError(
            "the model computes values that are not finite: its weights are too large for this precision, or broken; "
            "try --precision fp32, or an earlier checkpoint"
        )


def finite_json(value: Any) -> str:
    """The value as JSON in ASCII, which every terminal and pipe can show. RunError if a number is not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise RunError(f"a result is not finite, so that it cannot be written as JSON: {error}") from error
