"""Parts of a model that a config chooses by name. A user's module registers its own in the same
way."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thinker.runtime.registry import Registry

# (width, eps) -> norm
NORMS: Registry[Callable[[int, float], nn.Module]] = Registry("model.norm")
ACTIVATIONS: Registry[Callable[[Tensor], Tensor]] = Registry("model.activation")
# (ThinkerConfig) -> a module that maps (..., C) to (..., C)
MLPS: Registry[Callable[[Any], nn.Module]] = Registry("model.mlp")
