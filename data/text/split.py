"""Split of documents or of a single text into training and validation."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from thinker.data.text.document import Document
from thinker.data.text.sources import Source
from thinker.runtime.errors import UserError

TOLERANCE = 0.25  # how far the share of the validation split may be from what was asked
MIN_CUT_BYTES = 2048  # shorter documents are never cut

SplitDocument = tuple[str, Document]  # ("train" or "val", document)


def split_documents(
    source: Source,
    val_fraction: float,
    val_documents: Iterable[Document] = (),
    on_skipped: Callable[[int, int], Any] = lambda n_skipped, n_documents: None,
) -> Iterator[SplitDocument]:
    """Yield every document or piece of a text with its split.

    Few files of text may be of very different lengths. If their hashes would hold out much more or
    much less than val_fraction, the longest of them are cut, as a single text is: the end of each
    is for validation.

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
    longest = None
    if source.few_texts is not None and not held_out:
        longest = _least_cut_bytes(source.few_texts(), val_fraction)
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
            head, tail = _cut_text(document.text, data, max(cut - position, 0))
            position += len(data)
            for split, piece in (("train", head), ("val", tail)):
                if piece:
                    yield split, Document(piece, continues=split in begun)
                    begun.add(split)
        elif held_out:
            if _digest(data) not in held_out:
                yield "train", document
        elif longest is not None and len(data) >= longest:
            head, tail = _cut_text(document.text, data, _cut(len(data), val_fraction))
            yield "train", replace(document, text=head)
            yield "val", replace(document, text=tail)
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


def _cut_text(text: str, data: bytes, n_bytes: int) -> tuple[str, str]:
    """The first n_bytes of a text, and the rest. data: the text as UTF-8."""
    # Errors are ignored to move the cut to the start of a character.
    head = data[:n_bytes].decode(errors="ignore")
    return head, text[len(head) :]


def is_near(share: float, val_fraction: float) -> bool:
    """Whether a share of the text is about what was asked."""
    return abs(share - val_fraction) <= TOLERANCE * val_fraction


def _least_cut_bytes(documents: Iterable[Document], val_fraction: float) -> int | None:
    """The size from which on documents are cut, so that the share of validation is near the
    fraction; None if no cut is needed. As few are cut as possible."""
    sizes = []  # and whether the hash holds the document out
    for document in documents:
        data = document.text.encode()
        sizes.append((len(data), _hash_share(data) < val_fraction))
    total = sum(size for size, _ in sizes)
    n_val = sum(size for size, is_val in sizes if is_val)
    n_cut = 0
    least = None
    for size in sorted({size for size, _ in sizes}, reverse=True):
        if size < MIN_CUT_BYTES or is_near((n_val + val_fraction * n_cut) / total, val_fraction):
            break
        least = size
        for other, is_val in sizes:
            if other == size:
                n_cut += size
                n_val -= size * is_val
    return least


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
