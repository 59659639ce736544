"""Shards of tokens that count, for the tests of windows and of the order of training."""

import numpy as np

from thinker.data.corpus.shard_writer import ShardWriter
from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer

TOKENIZER = make_tokenizer("byte", [])


def write_tokens(folder, lengths, shard_tokens=1 << 20, log_probs=None):
    """Documents of these lengths, their tokens counting 0, 1, 2, ... modulo 256 through the whole
    set."""
    writer = ShardWriter(folder, "train", TOKENIZER, shard_tokens)
    start = 0
    for i, length in enumerate(lengths):
        ids = np.arange(start, start + length) % 256
        writer.add(ids, length, None if log_probs is None else log_probs[i])
        start += length
    writer.close()
    return TokenShards.open(folder, writer.files, TOKENIZER)
