"""Ollama: a Modelfile beside a GGUF file."""
