"""Split of documents or of a single text into training and validation."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinker.data.text.document import Document
from thinker.data.text.sources import Source
from thinker.runtime.errors import UserError

SplitDocument = tuple[str, Document]  # ("train" or "val", document)


def split_documents(
    source: Source,
    val_fraction: float,
    val_documents: Iterable[Document] = (),
    on_skipped: Callable[[int, int], Any] = lambda n_skipped, n_documents: None,
) -> Iterator[SplitDocument]:
    """Yield every document or piece of a text with its split.

    val_documents: if any, they are the whole "val" split, and documents of the source that are the
    same are left out.
    on_skipped: called at the end if documents without text were skipped, with their number and that
    of all documents.
    """
    held_out = set()
    for document in val_documents:
        held_out.add(_digest(document.text.encode()))
        yield "val", document
    cut = _cut(source.n_bytes or 0, val_fraction)
    position = 0  # in a single text, in bytes
    begun = set()  # splits of a single text that have a piece
    n_documents = 0
    n_empty = 0
    for document in source.documents():
        data = document.text.encode()
        n_documents += 1
        if not data:
            n_empty += 1
        elif source.whole_text:
            # Errors are ignored to move the cut to the start of a character.
            head = data[: max(cut - position, 0)].decode(errors="ignore")
            tail = document.text[len(head) :]
            position += len(data)
            for split, piece in (("train", head), ("val", tail)):
                if piece:
                    yield split, Document(piece, continues=split in begun)
                    begun.add(split)
        elif held_out:
            if _digest(data) not in held_out:
                yield "train", document
        elif _hash_share(data) < val_fraction:
            yield "val", document
        else:
            yield "train", document
    if n_documents == n_empty:
        wanted = "a file with text" if source.whole_text else "at least two documents with text"
        raise UserError(f"data.source={source.name}: the corpus is empty; provide {wanted}")
    if n_empty:
        on_skipped(n_empty, n_documents)


def _cut(n_bytes: int, val_fraction: float) -> int:
    """Where the training part of a single text ends. No part is empty, unless the fraction is 0."""
    if val_fraction == 0:
        return n_bytes
    n_train = round(n_bytes * (1 - val_fraction))
    return min(max(n_train, 1), n_bytes - 1)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _hash_share(data: bytes) -> float:
    """Hash of a document as a fraction from 0 to 1."""
    return int.from_bytes(_digest(data)[:4], "big") / 2**32


def empty_split_error(split: str, source: Source, val_fraction: float) -> UserError:
    """Error for an empty split, with a val_fraction that works if there is one."""
    remedy = "; add text"
    if not source.whole_text:
        distinct = set()
        for document in source.documents():
            if document.text:
                distinct.add(_hash_share(document.text.encode()))
        shares = sorted(distinct)
        remedy = " (identical documents share a split); add documents"
        if len(shares) > 1:
            # A tenth of the documents, with the cut between two neighbors.
            n_val = max(1, len(shares) // 10)
            fraction = (shares[n_val - 1] + shares[n_val]) / 2
            remedy += (
                f", or set data.val_fraction={fraction:.4f}, "
                f"to validate on {n_val} of {len(shares)} documents"
            )
    where = f"data.source={source.name}: the {split} split is empty with"
    return UserError(f"{where} data.val_fraction={val_fraction}{remedy}")
