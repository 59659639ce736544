"""Ollama: a Modelfile beside a GGUF file."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="ollama", arguments={"export_gguf": "thinker.features.ollama.export:ModelfileBesideGguf"}
)
