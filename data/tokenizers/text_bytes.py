"""Bytes of text per token, for bits per byte.

Also of tokenizers that change the text they encode.
"""

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.tokenizer import Tokenizer, replace_surrogates

READ_TOKENS = 1 << 20  # tokens per lookup


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text per token id, (vocab_size,) int64; 0 for special tokens and gaps."""
    lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    return np.array(lengths, dtype=np.int64)


def scaled_byte_lengths(tokens: TokenShards, tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text per token id, (vocab_size,).

    Scaled to the original texts if encoding may change them.
    """
    lengths = token_byte_lengths(tokenizer)
    if not tokenizer.may_lose_text or tokens.has_conversations:
        return lengths
    n_decoded = 0
    for shard in tokens.shards:
        for start in range(0, shard.n_tokens, READ_TOKENS):
            n_decoded += int(lengths[shard.tokens[start : start + READ_TOKENS]].sum())
    return lengths * (tokens.n_bytes / max(n_decoded, 1))


def count_bytes(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], start: int = 0, end: int | None = None
) -> int:
    """Count the UTF-8 bytes of the part of a text that ids[start:end] encode.

    `ids` encode the whole text. An estimate if encoding changes the text; the total over all ids is
    always exact.
    """
    n_bytes = len(replace_surrogates(text).encode())
    n_decoded = len(tokenizer.decode_bytes(ids))
    if n_decoded == 0:
        return n_bytes
    n_in_part = len(tokenizer.decode_bytes(ids[start:end]))
    return round(n_bytes * n_in_part / n_decoded)


def loses_text(tokenizer: Tokenizer, text: str, ids: Iterable[int]) -> bool:
    """Whether ids do not decode to their text, as with unknown tokens.

    Ignores spaces before the text.
    """
    if not tokenizer.may_lose_text:
        return False
    return tokenizer.decode(ids).lstrip(" ") != text.lstrip(" ")


def warn_of_lost_text(n_lost: int, n_texts: int) -> None:
    """Warn on standard error if the tokenizer does not reproduce `n_lost` texts."""
    if n_lost == 0:
        return
    lost = "characters of the text"
    if n_texts > 1:
        lost = f"characters in {n_lost:,} of {n_texts:,} texts"
    print(f"the tokenizer loses {lost}, so bits per byte are too low", file=sys.stderr)
