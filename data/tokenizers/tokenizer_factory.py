"""Create the tokenizer that a config names.

Bytes, characters, a BPE trained on the text, an encoding of tiktoken, or a saved tokenizer.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator

import tiktoken

from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import (
    BOS_TOKEN,
    MAX_VOCAB,
    ONE_CHARACTER,
    PIECE_CHARS,
    SINGLE_BYTES,
    Tokenizer,
)
from thinker.runtime.errors import UserError, did_you_mean

SAMPLE_BYTES = 32 << 20  # maximum bytes of UTF-8 to train a tokenizer on
# GPT-4's pattern without possessive quantifiers, which other libraries interpret differently.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def is_path(spec: str | None) -> bool:
    """Whether spec is the path of a saved tokenizer, which may not exist."""
    if spec in (None, "byte", "char"):
        return False
    kind, _, _ = spec.partition(":")
    return kind not in ("bpe", "tiktoken")


def check_spec(spec: str) -> str:
    """Return the kind of tokenizer in spec: byte, char, bpe (:VOCAB), tiktoken (:NAME) or path.

    Raises UserError.
    """
    if is_path(spec):
        if not os.path.exists(spec):
            kinds = "byte, char, bpe:VOCAB, tiktoken:NAME nor the path of a saved tokenizer"
            raise UserError(f"data.tokenizer={spec} is neither {kinds}{_hint(spec)}")
        return "path"
    kind, _, option = spec.partition(":")
    if kind == "bpe":
        is_number = re.fullmatch("[0-9]{1,9}", option)
        if not is_number or not 258 <= int(option) <= MAX_VOCAB:
            raise UserError(
                f"data.tokenizer={spec}: bpe:VOCAB needs an integer from 258 (256 bytes, one "
                f"merge, the BOS token) to {MAX_VOCAB}, for example bpe:4096"
            )
    if kind == "tiktoken":
        names = tiktoken.list_encoding_names()
        if option not in names:
            hint = did_you_mean(option, names)
            raise UserError(f"data.tokenizer={spec}: choose from {', '.join(names)}{hint}")
    return kind


def _hint(spec: str) -> str:
    """What a misspelled spec may mean."""
    known = ["byte", "char", "bpe:4096"]
    for name in tiktoken.list_encoding_names():
        known.append(f"tiktoken:{name}")
    return did_you_mean(spec, known) or did_you_mean(f"tiktoken:{spec}", known)


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Create the tokenizer that spec names (see check_spec); "char" and "bpe" are trained on texts.

    Reads at most SAMPLE_BYTES of the texts. If they are too short, bpe:VOCAB has fewer tokens.
    Raises UserError.
    """
    kind = check_spec(spec)
    _, _, option = spec.partition(":")
    if kind == "bpe":
        return _train_bpe(int(option), texts)
    if kind == "tiktoken":
        return _load_tiktoken(option)
    if kind == "path":
        return load_tokenizer(spec)
    tokens = list(SINGLE_BYTES)
    if kind == "char":
        characters: set[str] = set()
        for text in _sample(texts):
            characters.update(text)
        tokens += [c.encode() for c in sorted(characters) if ord(c) > 127]  # others are a byte
    return _with_bos(kind, tokens)


def _with_bos(kind: str, tokens: list[bytes], pattern: str = ONE_CHARACTER) -> Tokenizer:
    return Tokenizer(kind, [*tokens, None], {BOS_TOKEN: len(tokens)}, pattern=pattern)


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """The beginning of the texts, in pieces."""
    left = SAMPLE_BYTES
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            yield piece
            left -= len(piece.encode())
            if left <= 0:
                return


def _train_bpe(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    import rustbpe

    trainer = rustbpe.Tokenizer()
    # One id is left for the BOS token.
    trainer.train_from_iterator(_sample(texts), vocab_size - 1, pattern=WORDS)
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1])
    tokens = [bytes(token) for token, _ in ranked]
    if len(tokens) == 256 < vocab_size - 1:
        raise UserError(
            f"data.tokenizer=bpe:{vocab_size}: no pair of bytes occurs twice in the text; use byte"
        )
    return _with_bos("bpe", tokens, WORDS)


def _load_tiktoken(name: str) -> Tokenizer:
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
