"""Thinker: train, sample and understand small decoder-only language models.

    from thinker import Generator, SamplingParams, Thinker, ThinkerConfig, load

Names are imported when they are first used, so that `import thinker` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinker.generation import Completion, Generator, SamplingParams
    from thinker.interop import load, save
    from thinker.model import KVCache, Thinker, ThinkerConfig
    from thinker.training.api import train

_MODULES = {
    "Completion": "thinker.generation",
    "Generator": "thinker.generation",
    "KVCache": "thinker.model",
    "SamplingParams": "thinker.generation",
    "Thinker": "thinker.model",
    "ThinkerConfig": "thinker.model",
    "UserError": "thinker.runtime.errors",
    "load": "thinker.interop",
    "save": "thinker.interop",
    "train": "thinker.training.api",
}

__all__ = [
    "Completion",
    "Generator",
    "KVCache",
    "SamplingParams",
    "Thinker",
    "ThinkerConfig",
    "UserError",
    "load",
    "save",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name from its package."""
    if name not in _MODULES:
        raise AttributeError(f"module 'thinker' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
