"""Text generation."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinker.generation.engine import Generator
    from thinker.generation.sampling_params import SamplingParams
    from thinker.generation.scoring import Score
    from thinker.generation.sequence import Completion

# By name, the module that defines it. Each is imported when it is used, because that imports torch.
_MODULES = {
    "Completion": "thinker.generation.sequence",
    "Generator": "thinker.generation.engine",
    "SamplingParams": "thinker.generation.sampling_params",
    "Score": "thinker.generation.scoring",
}
__all__ = ["Completion", "Generator", "SamplingParams", "Score"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
