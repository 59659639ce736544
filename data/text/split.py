"""Split of documents or of a single text into training and validation."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinker.data.text.document import Document
from thinker.data.text.sources import Source
from thinker.runtime.errors import UserError

SplitDocument = tuple[str, Document]  # ("train" or "val", document)


def split_documents(
    source: Source, val_fraction: float, val_documents: Iterable[Document] = (),
    on_skipped: Callable[[int, int], Any] = lambda n_skipped, n_documents: None,
) -> Iterator[SplitDocument]:  # fmt: skip
    """Yield every document or piece of a text with its split; `val_documents`, if any, are the whole "val" split.

    on_skipped: called at the end if documents without text were skipped, with their number and that of all documents.
    """
    held_out = set()
    for document in val_documents:
        held_out.add(hashlib.sha256(document.text.encode()).digest())
        yield "val", document
    n_empty = n_documents = position = 0  # position: in a single text, in bytes
    n_bytes = source.n_bytes or 0
    cut = min(max(round(n_bytes * (1 - val_fraction)), 1), n_bytes - 1) if val_fraction else n_bytes
    for document in source.documents():
        data = document.text.encode()
        n_documents += 1
        if not data:
            n_empty += 1
        elif source.whole_text:
            head = data[: max(cut - position, 0)].decode(
                errors="ignore"
            )  # move the cut to the start of a character
            tail = document.text[len(head) :]
            position += len(data)
            if head:
                yield "train", Document(head)
            if tail:
                yield "val", Document(tail)
        else:
            is_val = not held_out and _hash_share(data) < val_fraction
            if hashlib.sha256(data).digest() not in held_out:
                yield "val" if is_val else "train", document
    if n_documents == n_empty:
        wanted = "a file with text" if source.whole_text else "at least two documents with text"
        raise UserError(f"data.source={source.name}: the corpus is empty; provide {wanted}")
    if n_empty:
        on_skipped(n_empty, n_documents)


def _hash_share(data: bytes) -> float:
    """Hash of a document as a fraction from 0 to 1."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") / 2**32


def empty_split_error(split: str, source: Source, val_fraction: float) -> UserError:
    """Error for an empty split, with a val_fraction that works if there is one."""
    remedy = "; add text"
    if not source.whole_text:
        shares = sorted(
            {
                _hash_share(document.text.encode())
                for document in source.documents()
                if document.text
            }
        )
        remedy = " (identical documents share a split); add documents"
        if len(shares) > 1:
            n_val = max(1, len(shares) // 10)
            fraction = (shares[n_val - 1] + shares[n_val]) / 2
            remedy += f", or set data.val_fraction={fraction:.4f}, to validate on {n_val} of {len(shares)} documents"
    where = f"data.source={source.name}: the {split} split is empty with"
    return UserError(f"{where} data.val_fraction={val_fraction}{remedy}")
