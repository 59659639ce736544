"""Create the tokenizer that a config names: bytes, characters, trained BPE, a tiktoken encoding or a saved one."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

from thinker.data.tokenizers import tokenizer_conversion
from thinker.data.tokenizers.tokenizer import (
    BOS_TOKEN,
    FILE_NAME,
    MAX_VOCAB,
    ONE_CHARACTER,
    PIECE_CHARS,
    Tokenizer,
)
from thinker.runtime.errors import UserError, did_you_mean

SAMPLE_BYTES = 32 << 20  # maximum bytes of UTF-8 to train a tokenizer on
# GPT-4's pattern without possessive quantifiers, which other libraries interpret differently.
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def is_path(spec: str | None) -> bool:
    """Whether spec is the path of a saved tokenizer, which may not exist."""
    return spec not in (None, "byte", "char") and spec.partition(":")[0] not in ("bpe", "tiktoken")


def check_spec(spec: str) -> str:
    """Return the kind of tokenizer in spec: byte, char, bpe (:VOCAB), tiktoken (:NAME) or path. Raises UserError."""
    kind, _, option = spec.partition(":")
    names = tiktoken.list_encoding_names() if kind == "tiktoken" else []
    if kind == "bpe" and not (
        re.fullmatch("[0-9]{1,9}", option) and 258 <= int(option) <= MAX_VOCAB
    ):
        wanted = f"an integer from 258 (256 bytes, one merge, the BOS token) to {MAX_VOCAB}, for example bpe:4096"
        raise UserError(f"data.tokenizer={spec}: bpe:VOCAB needs {wanted}")
    if kind == "tiktoken" and option not in names:
        raise UserError(
            f"data.tokenizer={spec}: choose from {', '.join(names)}{did_you_mean(option, names)}"
        )
    if not is_path(spec):
        return kind
    if not os.path.exists(spec):
        known = [
            "byte",
            "char",
            "bpe:4096",
            *(f"tiktoken:{name}" for name in tiktoken.list_encoding_names()),
        ]
        hint = did_you_mean(spec, known) or did_you_mean(f"tiktoken:{spec}", known)
        kinds = "byte, char, bpe:VOCAB, tiktoken:NAME nor the path of a saved tokenizer"
        raise UserError(f"data.tokenizer={spec} is neither {kinds}{hint}")
    return "path"


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Create the tokenizer that spec names (see check_spec); "char" and "bpe" are trained on texts.

    Reads at most SAMPLE_BYTES of the texts. If they are too short, bpe:VOCAB has fewer tokens. Raises UserError.
    """
    kind, option = check_spec(spec), spec.partition(":")[2]
    single_bytes = [bytes([b]) for b in range(256)]
    if kind == "byte":
        return _with_bos("byte", single_bytes)
    if kind == "char":
        characters = set(itertools.chain.from_iterable(_sample(texts)))
        return _with_bos(
            "char", single_bytes + [c.encode() for c in sorted(characters) if ord(c) > 127]
        )
    if kind == "bpe":
        return _train_bpe(int(option), texts)
    return _load_tiktoken(option) if kind == "tiktoken" else load_tokenizer(spec)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder contains a tokenizer in our format or Hugging Face's."""
    return any(
        (Path(folder) / name).is_file() for name in (FILE_NAME, tokenizer_conversion.FILE_NAME)
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a saved tokenizer from a run directory, its file, or a Hugging Face folder. Raises UserError."""
    if (Path(path) / tokenizer_conversion.FILE_NAME).is_file() and not (
        Path(path) / FILE_NAME
    ).is_file():
        return tokenizer_conversion.read(Path(path))
    return Tokenizer.load(path)


def _with_bos(kind: str, tokens: list[bytes], pattern: str = ONE_CHARACTER) -> Tokenizer:
    return Tokenizer(kind, [*tokens, None], {BOS_TOKEN: len(tokens)}, pattern=pattern)


def _sample(texts: Iterable[str]) -> Iterator[str]:
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
    trainer.train_from_iterator(_sample(texts), vocab_size - 1, pattern=WORDS)
    ranks = sorted((rank, bytes(token)) for token, rank in trainer.get_mergeable_ranks())
    if len(ranks) == 256 < vocab_size - 1:
        raise UserError(
            f"data.tokenizer=bpe:{vocab_size}: no pair of bytes occurs twice in the text; use byte"
        )
    return _with_bos("bpe", [token for _, token in ranks], WORDS)


def _load_tiktoken(name: str) -> Tokenizer:
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # includes the errors of requests
        url = getattr(getattr(error, "request", None), "url", None)
        if url is None:
            raise
        raise UserError(
            f"data.tokenizer=tiktoken:{name}: cannot download {url} ({type(error).__name__}); go online once,"
            f" or set TIKTOKEN_CACHE_DIR to a folder with that file, named {hashlib.sha1(url.encode()).hexdigest()}"
        ) from error
    texts = {rank: token for token, rank in encoding._mergeable_ranks.items()}
    tokens = [texts.get(i) for i in range(encoding.max_token_value + 1)]
    eot = next(text for text, i in encoding._special_tokens.items() if i == encoding.eot_token)
    return Tokenizer(f"tiktoken:{name}", tokens, encoding._special_tokens, eot, encoding._pat_str)
