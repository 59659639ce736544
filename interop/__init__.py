"""Models in other formats: Hugging Face folders, peft adapters, GGUF.

load() opens any of them, save() writes ours.
"""

from typing import TYPE_CHECKING

from thinker.interop.load import load

if TYPE_CHECKING:
    from thinker.interop.save_model import save

__all__ = ["load", "save"]


def __getattr__(name: str) -> object:
    """Import save() when it is first used: most commands only load a model."""
    if name == "save":
        from thinker.interop.save_model import save

        return save
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
