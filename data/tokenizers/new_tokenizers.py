"""New tokenizers: bytes, characters and a BPE of the text, and the encodings of tiktoken."""

import hashlib
from collections.abc import Iterable

import tiktoken

from thinker.data.tokenizers.tokenizer import BOS_TOKEN, ONE_CHARACTER, SINGLE_BYTES, Tokenizer
from thinker.runtime.errors import UserError

# GPT-4's pattern without possessive quantifiers, which other libraries interpret differently.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def byte_tokenizer(option: str, texts: Iterable[str]) -> Tokenizer:
    """One token per byte."""
    return _with_bos("byte", list(SINGLE_BYTES))


def char_tokenizer(option: str, texts: Iterable[str]) -> Tokenizer:
    """One token per byte, and one per character of the texts that has several bytes."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    tokens = list(SINGLE_BYTES)
    tokens += [c.encode() for c in sorted(characters) if ord(c) > 127]
    return _with_bos("char", tokens)


def bpe_tokenizer(option: str, texts: Iterable[str]) -> Tokenizer:
    """A BPE with `option` tokens at most, trained on the texts."""
    import rustbpe

    vocab_size = int(option)
    trainer = rustbpe.Tokenizer()
    # One id is left for the BOS token.
    trainer.train_from_iterator(texts, vocab_size - 1, pattern=WORDS)
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
    tokens = [bytes(token) for token, _ in ranked]
    if len(tokens) == 256 < vocab_size - 1:
        raise UserError(
            f"data.tokenizer=bpe:{vocab_size}: no pair of bytes occurs twice in the text; use byte"
        )
    return _with_bos("bpe", tokens, WORDS)


def tiktoken_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """An encoding of tiktoken. Raises UserError if it cannot be downloaded."""
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # includes the errors of requests
        request = getattr(error, "request", None)
        url = getattr(request, "url", None)
        if url is None:
            raise
        file_name = hashlib.sha1(url.encode()).hexdigest()  # in the cache of tiktoken
        raise UserError(
            f"data.tokenizer=tiktoken:{name}: cannot download {url} ({type(error).__name__}); "
            "go online once, or set TIKTOKEN_CACHE_DIR to a folder with that file, "
            f"named {file_name}"
        ) from error
    # Ids between the ordinary and the special tokens are gaps.
    tokens: list[bytes | None] = [None] * (encoding.max_token_value + 1)
    for token, rank in encoding._mergeable_ranks.items():
        tokens[rank] = token
    special_tokens = encoding._special_tokens
    # The token that ends a text there starts our documents.
    eot = next(name for name, number in special_tokens.items() if number == encoding.eot_token)
    return Tokenizer(f"tiktoken:{name}", tokens, special_tokens, eot, encoding._pat_str)


def _with_bos(kind: str, tokens: list[bytes], pattern: str = ONE_CHARACTER) -> Tokenizer:
    return Tokenizer(kind, [*tokens, None], {BOS_TOKEN: len(tokens)}, pattern=pattern)
