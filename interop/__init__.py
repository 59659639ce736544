"""Models in other formats: Hugging Face folders, peft adapters, GGUF. load() opens any of them."""

from thinker.interop.load import load

__all__ = ["load"]
