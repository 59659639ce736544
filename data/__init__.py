"""Data pipeline: sources, tokenizers, token shards and windows. Independent of the model."""
