"""Create the tokenizer that a config names.

Bytes, characters, a BPE trained on the text, an encoding of tiktoken, or a saved tokenizer.
"""

import os
import re
from collections.abc import Iterable, Iterator

import tiktoken

from thinker.data.tokenizers.saved_tokenizer import load_tokenizer
from thinker.data.tokenizers.tokenizer import MAX_VOCAB, PIECE_CHARS, Tokenizer
from thinker.runtime.errors import UserError, did_you_mean
from thinker.runtime.registry import import_offer

SAMPLE_BYTES = 32 << 20  # maximum bytes of UTF-8 to train a tokenizer on
# By kind, a function (what follows the colon, texts) -> Tokenizer.
MAKERS = {
    "byte": "thinker.data.tokenizers.new_tokenizers:byte_tokenizer",
    "char": "thinker.data.tokenizers.new_tokenizers:char_tokenizer",
    "bpe": "thinker.data.tokenizers.new_tokenizers:bpe_tokenizer",
    "tiktoken": "thinker.data.tokenizers.new_tokenizers:tiktoken_tokenizer",
}


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
    if kind == "path":
        return load_tokenizer(spec)
    make = import_offer(MAKERS[kind])
    _, _, option = spec.partition(":")
    return make(option, first_bytes(texts, SAMPLE_BYTES))


def first_bytes(texts: Iterable[str], n_bytes: int) -> Iterator[str]:
    """The beginning of the texts, in pieces."""
    left = n_bytes
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            yield piece
            left -= len(piece.encode())
            if left <= 0:
                return
