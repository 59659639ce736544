"""Token files in the format of llm.c, such as FineWeb's standard validation tokens, used for
published losses."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from thinker.data.corpus.document_filter import DocumentFilter
from thinker.data.text.document import Document, MissingData
from thinker.data.text.sources import Source
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

HEADER = np.array([20240520, 1], "<i4")  # magic number and version; the number of tokens follows
HEADER_BYTES = 1024


def check_val_tokens(
    val_tokens: str, kind: str, source: Source, document_filter: DocumentFilter | None
) -> None:
    """Raise UserError if a file of validation tokens is missing, or does not fit the other
    options."""
    if kind in ("bpe", "char", "byte") or source.whole_text:
        needs = (
            "data.tokenizer=tiktoken:gpt2 or the path of a tokenizer, and a source other "
            "than a single text file"
        )
        raise UserError(f"data.val_tokens needs {needs}")
    if document_filter is not None:
        key = document_filter.config_key
        raise UserError(f"{key} cannot be combined with data.val_tokens; remove one of them")
    if not os.path.isfile(val_tokens):
        raise MissingData(
            f"data.val_tokens={val_tokens} is not a file; set the path of a token file"
        )


def read_documents(path: str | Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of a file; see read_tokens().

    Skips the last document, which may be cut. Raises UserError for other formats or tokenizers.
    """
    tokens = read_tokens(path, tokenizer, f"data.val_tokens={path}", "data.tokenizer")
    for start, end in pairwise(np.flatnonzero(tokens == tokenizer.bos_id)):
        yield Document(tokenizer.decode(tokens[start + 1 : end].tolist()))


def read_tokens(path: str | Path, tokenizer: Tokenizer, name: str, of: str) -> np.ndarray:
    """The tokens of a file, (N,) uint16: a header, then tokens, with a BOS token before each
    document.

    name, of: how messages name the file, and its tokenizer. Raises UserError for other formats or
    tokenizers.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    header = data[:12].tobytes()
    if header[:8] != HEADER.tobytes() or len(data) != HEADER_BYTES + 2 * int.from_bytes(
        header[8:], "little"
    ):
        raise UserError(f"{name} is not a complete token file such as fineweb_val_000000.bin")
    tokens = data[HEADER_BYTES:].view("<u2")
    begins = len(tokens) > 0 and tokens[0] == tokenizer.bos_id
    if not begins or tokens.max() >= tokenizer.vocab_size:
        raise UserError(f"{name} does not match {of}; use the tokenizer of the file")
    return tokens
