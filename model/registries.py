"""Parts of a model that a config chooses by name. A user's module registers its own in the same
way."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thinker.runtime.registry import Registry

NORMS: Registry[Callable[[int, float], nn.Module]] = Registry("model.norm")  # (width, eps) -> norm
ACTIVATIONS: Registry[Callable[[Tensor], Tensor]] = Registry("model.activation")
MLPS: Registry[Callable[[Any], nn.Module]] = Registry(
    "model.mlp"
)  # (ThinkerConfig) -> (..., C) map
