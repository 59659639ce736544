"""Thinker: train, sample and understand small decoder-only language models.

    from thinker import Generator, SamplingParams, Thinker, ThinkerConfig, load

Names are imported when they are first used, so that `import thinker` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinker.api.evaluating import evaluate
    from thinker.api.inspecting import inspect
    from thinker.api.training import plan, train
    from thinker.data.text.registered_source import register_source
    from thinker.data.text.sources import SOURCES
    from thinker.generation import Completion, Generator, SamplingParams
    from thinker.interop import load, save
    from thinker.interop.export_huggingface import export_huggingface
    from thinker.interop.gguf.export_gguf import export_gguf
    from thinker.model import KVCache, Thinker, ThinkerConfig
    from thinker.model.patterns.pattern import Pattern
    from thinker.model.patterns.pattern_parser import PATTERNS
    from thinker.model.registries import ACTIVATIONS, MLPS, NORMS
    from thinker.runtime.errors import UserError
    from thinker.training.callback import Callback
    from thinker.training.callbacks.registry import CALLBACKS
    from thinker.training.objective import Loss, Objective
    from thinker.training.optim.registry import OPTIMIZERS
    from thinker.training.tracking.tracker import Tracker
    from thinker.training.tracking.trackers import TRACKERS

_MODULES = {
    "ACTIVATIONS": "thinker.model.registries",
    "CALLBACKS": "thinker.training.callbacks.registry",
    "MLPS": "thinker.model.registries",
    "NORMS": "thinker.model.registries",
    "OPTIMIZERS": "thinker.training.optim.registry",
    "PATTERNS": "thinker.model.patterns.pattern_parser",
    "SOURCES": "thinker.data.text.sources",
    "TRACKERS": "thinker.training.tracking.trackers",
    "Callback": "thinker.training.callback",
    "Completion": "thinker.generation",
    "Generator": "thinker.generation",
    "KVCache": "thinker.model",
    "Loss": "thinker.training.objective",
    "Objective": "thinker.training.objective",
    "Pattern": "thinker.model.patterns.pattern",
    "SamplingParams": "thinker.generation",
    "Thinker": "thinker.model",
    "ThinkerConfig": "thinker.model",
    "Tracker": "thinker.training.tracking.tracker",
    "UserError": "thinker.runtime.errors",
    "evaluate": "thinker.api.evaluating",
    "export_gguf": "thinker.interop.gguf.export_gguf",
    "export_huggingface": "thinker.interop.export_huggingface",
    "inspect": "thinker.api.inspecting",
    "load": "thinker.interop",
    "plan": "thinker.api.training",
    "register_source": "thinker.data.text.registered_source",
    "save": "thinker.interop",
    "train": "thinker.api.training",
}

__all__ = [
    "ACTIVATIONS",
    "CALLBACKS",
    "MLPS",
    "NORMS",
    "OPTIMIZERS",
    "PATTERNS",
    "SOURCES",
    "TRACKERS",
    "Callback",
    "Completion",
    "Generator",
    "KVCache",
    "Loss",
    "Objective",
    "Pattern",
    "SamplingParams",
    "Thinker",
    "ThinkerConfig",
    "Tracker",
    "UserError",
    "evaluate",
    "export_gguf",
    "export_huggingface",
    "inspect",
    "load",
    "plan",
    "register_source",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its package, or look up the installed version."""
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'thinker' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def _version() -> str:
    """The version that is installed, which comes from a tag."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as all the rest

    try:
        return version("thinker")
    except PackageNotFoundError:
        return "0+checkout"  # a folder that was never installed


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
