"""Text in, batches of token ids out: sources, tokenizers, token shards and windows. Knows nothing of the model."""
