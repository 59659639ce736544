"""GGUF, the single-file format of llama.cpp and related tools: read, written, verified."""
