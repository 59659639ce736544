"""Cleaning of a corpus: drop documents by length, quality and duplication, and report what was
dropped and why."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from thinker.data.text.document import Document
from thinker.data.text.sources import Source
from thinker.data.text.split import SplitDocument
from thinker.features.cleaning.near_duplicates import NearDuplicates
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

FORMAT = 1  # changes with the way to find what is dropped
N_EXAMPLES = 5  # per reason, in the report
EXAMPLE_CHARS = 200
KEEP, EXACT, NEAR = 0, 1, 2  # reasons, by number; those of the rules follow


@dataclass(frozen=True)
class CleaningRules:
    """Which documents to drop. None: the rule is off."""

    min_characters: int | None = None
    max_characters: int | None = None
    max_repeated_lines: float | None = None  # share of the characters, see repeated_lines()
    max_symbols: float | None = None  # share of the characters, see symbols()
    duplicates: Literal["exact", "near"] | None = None  # keep one of each group

    def violated(self, text: str) -> str | None:
        """The first rule that a text violates, as a reason in the report."""
        n = len(text)
        if self.min_characters is not None and n < self.min_characters:
            return "shorter than min_characters"
        if self.max_characters is not None and n > self.max_characters:
            return "longer than max_characters"
        if self.max_repeated_lines is not None and repeated_lines(text) > self.max_repeated_lines:
            return "above max_repeated_lines"
        if self.max_symbols is not None and symbols(text) > self.max_symbols:
            return "above max_symbols"
        return None


def repeated_lines(text: str) -> float:
    """The share of the characters of a text in lines that have occurred before, without empty
    lines."""
    seen: set[str] = set()
    repeated = total = 0
    for line in text.splitlines():
        line = line.strip()
        if line in seen:
            repeated += len(line)
        total += len(line)
        seen.add(line)
    return repeated / max(total, 1)


def symbols(text: str) -> float:
    """The share of the characters of a text that are neither letters with their marks, digits nor
    white space."""
    n = 0
    for char, count in Counter(text).items():
        is_word = unicodedata.category(char)[0] in "LMN"
        if not is_word and not char.isspace():
            n += count
    return n / max(len(text), 1)


class Cleaning:
    """The filter of `data.clean`: finds the documents to drop in one pass over a source, and drops
    them in the next.

    It is a thinker.data.corpus.document_filter.DocumentFilter.
    """

    config_key = "data.clean"

    def __init__(self, rules: CleaningRules) -> None:
        self.rules = rules
        self.reasons = np.zeros(0, np.uint8)  # (n,), by document
        self.names = ["", "exact duplicates", "near duplicates"]  # of the reasons
        self.report: dict[str, dict[str, Any]] = {}

    def check_source(self, source: Source) -> None:
        """Raise UserError for a source with a single document."""
        if source.whole_text:
            reason = "a single text file, which is one document"
            raise UserError(f"data.clean cannot clean {reason}; remove data.clean")

    def cache_key(self) -> list[Any]:
        """The format and the rules."""
        return [FORMAT, asdict(self.rules)]

    def decide(self, documents: Iterable[SplitDocument], folder: Path, progress: bool) -> None:
        """Read all documents. Of a group of near duplicates, one of the validation split is kept,
        or else the first."""
        near = NearDuplicates(folder) if self.rules.duplicates == "near" else None
        compared: list[int] = []  # the numbers of the documents that `near` has
        reasons = bytearray()
        is_val = bytearray()
        seen: set[bytes] = set()
        bar = Progress(documents, desc="cleaning", unit=" documents", disable=not progress)
        for number, (split, document) in enumerate(bar):
            text = _plain_text(document)
            reason = self._reason(document, text, seen)
            is_val.append(split == "val")
            reasons.append(reason)
            if reason == KEEP and near is not None:
                near.add(text)
                compared.append(number)
        self.reasons = np.frombuffer(reasons, np.uint8).copy()
        if near is not None:
            numbers = np.array(compared, np.int64)
            is_train = np.frombuffer(is_val, np.uint8)[numbers] == 0
            group = near.find()
            order = np.lexsort((numbers, is_train, group))
            is_kept = (
                np.diff(group[order], prepend=-1) != 0
            )  # the first of each group in this order
            self.reasons[numbers[order[~is_kept]]] = NEAR

    def _reason(self, document: Document, text: str, seen: set[bytes]) -> int:
        """Why a document is dropped, without near duplicates. `seen`: hashes of the documents
        before it."""
        violated = self.rules.violated(text)
        if violated is not None:
            if violated not in self.names:
                self.names.append(violated)
            return self.names.index(violated)
        if self.rules.duplicates is None:
            return KEEP
        digest = hashlib.sha256(document.text.encode()).digest()[:8]
        if digest in seen:
            return EXACT
        seen.add(digest)
        return KEEP

    def drop(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        """Yield the documents that stay, and count the others in `report`, which starts anew."""
        self.report = {}
        for number, (split, document) in enumerate(documents):
            reason = self.reasons[number]
            if reason == KEEP:
                yield split, document
                continue
            entry = self.report.setdefault(self.names[reason], {"count": 0, "examples": []})
            entry["count"] += 1
            if len(entry["examples"]) < N_EXAMPLES:
                entry["examples"].append(document.text[:EXAMPLE_CHARS])

    def summary(self) -> str:
        """What was dropped, as one line."""
        dropped = self.reasons[self.reasons != KEEP]
        counts = Counter(self.names[reason] for reason in dropped.tolist())
        total = len(dropped)
        n = len(self.reasons)
        line = f"cleaning: dropped {total:,} of {n:,} documents ({total / max(n, 1):.1%})"
        if not counts:
            return line
        parts = [f"{count:,} {name}" for name, count in counts.most_common()]
        return f"{line}: {', '.join(parts)}"


def _plain_text(document: Document) -> str:
    """A text, or the contents of the messages of a conversation."""
    if document.messages is None:
        return document.text
    return "\n".join(message.get("content", "") for message in document.messages)
