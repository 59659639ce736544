"""Bytes of text per token, for bits per byte; also with tokenizers that change the text that they encode."""

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from thinker.data.shards import TokenShards
from thinker.data.tokenizer import Tokenizer, replace_surrogates

READ_TOKENS = 1 << 20  # looked up at once


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """(vocab_size,) int64: bytes of text per token id; 0 for special tokens and gaps."""
    return np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)], dtype=np.int64)


def scaled_byte_lengths(tokens: TokenShards, tokenizer: Tokenizer) -> np.ndarray:
    """(vocab_size,): bytes of text per token id; scaled to those of the texts if encoding may have changed them."""
    lengths = token_byte_lengths(tokenizer)
    if not tokenizer.may_lose_text or tokens.has_conversations:
        return lengths
    n_decoded = 0
    for shard in tokens.shards:
        for start in range(0, shard.n_tokens, READ_TOKENS):
            n_decoded += int(lengths[shard.tokens[start : start + READ_TOKENS]].sum())
    return lengths * (tokens.n_bytes / max(n_decoded, 1))


def count_bytes(tokenizer: Tokenizer, text: str, ids: Sequence[int], start: int = 0, end: int | None = None) -> int:
    """The bytes of UTF-8 of the part of a text that ids[start:end] stand for, where `ids` is the text, encoded.

    An estimate where encoding changes the text; all the ids together always have the bytes of the text itself.
    """
    n_bytes, n_decoded = len(replace_surrogates(text).encode()), len(tokenizer.decode_bytes(ids))
    return round(n_bytes * len(tokenizer.decode_bytes(ids[start:end])) / n_decoded) if n_decoded else n_bytes


def loses_text(tokenizer: Tokenizer, text: str, ids: Iterable[int]) -> bool:
    """Whether a text's ids do not give it back, as with unknown tokens. A space before the text does not count."""
    return tokenizer.may_lose_text and tokenizer.decode(ids).lstrip(" ") != text.lstrip(" ")


def warn_of_lost_text(n_lost: int, n_texts: int) -> None:
    """Say on standard error that the tokenizer does not give back `n_lost` of the texts, if any."""
    if n_lost:
        lost = f"characters of {n_lost:,} of {n_texts:,} texts" if n_texts > 1 else "characters of the text"
        print(f"the tokenizer loses {lost}, so bits per byte are too low", file=sys.stderr)
