"""Models in other formats: Hugging Face folders, peft adapters, GGUF.

load() opens any of them, save() writes ours.
"""

from thinker.interop.load import load
from thinker.interop.save import save

__all__ = ["load", "save"]
