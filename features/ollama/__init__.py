"""Ollama: a Modelfile beside a GGUF file."""

from thinker.runtime.registry import Feature

FEATURE = Feature(name="ollama")
