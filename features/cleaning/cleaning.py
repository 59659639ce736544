"""Cleaning of a corpus: drop documents by length, quality and duplication, and report what was dropped and why."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from thinker.data.text.document import Document
from thinker.data.text.split import SplitDocument
from thinker.features.cleaning.near_duplicates import NearDuplicates

N_EXAMPLES, EXAMPLE_CHARS = 5, 200  # per reason, in the report
KEEP, EXACT, NEAR = 0, 1, 2  # reasons; those of the rules follow


@dataclass(frozen=True)
class CleaningRules:
    """Which documents to drop. None: the rule is off."""

    min_characters: int | None = None
    max_characters: int | None = None
    max_repeated_lines: float | None = (
        None  # share of the characters in lines that have occurred before
    )
    max_symbols: float | None = (
        None  # share of the characters that are neither letters, digits nor white space
    )
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


def _plain_text(document: Document) -> str:
    """A text, or the contents of the messages of a conversation."""
    if document.messages is None:
        return document.text
    return "\n".join(message.get("content", "") for message in document.messages)


def repeated_lines(text: str) -> float:
    """The share of the characters of a text in lines that have occurred before, without empty lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    seen, repeated = set(), 0
    for line in lines:
        repeated += len(line) if line in seen else 0
        seen.add(line)
    return repeated / max(sum(map(len, lines)), 1)


def symbols(text: str) -> float:
    """The share of the characters of a text that are neither letters with their marks, digits nor white space."""
    counts = Counter(text)
    n = sum(
        count
        for char, count in counts.items()
        if not (char.isspace() or unicodedata.category(char)[0] in "LMN")
    )
    return n / max(len(text), 1)


@dataclass
class Cleaning:
    """Finds the documents to drop in a first pass over the source, and drops them in a second pass."""

    rules: CleaningRules
    reasons: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # (n,), by document
    names: list[str] = field(default_factory=lambda: ["", "exact duplicates", "near duplicates"])
    report: dict[str, dict[str, Any]] = field(default_factory=dict)  # by reason: count and examples

    def find(self, documents: Iterable[SplitDocument], folder: Path, progress: bool) -> None:
        """Read all documents. Of a group of near duplicates, one of the validation split is kept, or else the first."""
        rules, reasons, is_val, seen = self.rules, bytearray(), bytearray(), set()
        near = NearDuplicates(folder) if rules.duplicates == "near" else None
        compared = []  # the numbers of the documents that `near` has
        bar = tqdm(documents, desc="cleaning", unit=" documents", disable=not progress)
        for number, (split, document) in enumerate(bar):
            is_val.append(split == "val")
            text = _plain_text(document)
            violated, key = (
                rules.violated(text),
                hashlib.sha256(document.text.encode()).digest()[:8],
            )
            if violated is not None and violated not in self.names:
                self.names.append(violated)
            reasons.append(KEEP if violated is None else self.names.index(violated))
            if violated is None and rules.duplicates is not None:
                reasons[-1] = EXACT if key in seen else KEEP
                seen.add(key)
                if near is not None and reasons[-1] == KEEP:
                    near.add(text)
                    compared.append(number)
        self.reasons = np.frombuffer(reasons, np.uint8).copy()
        if near is not None:
            numbers, group = np.array(compared, np.int64), near.find()
            order = np.lexsort((numbers, np.frombuffer(is_val, np.uint8)[numbers] == 0, group))
            is_kept = (
                np.diff(group[order], prepend=-1) != 0
            )  # the first of each group in this order
            self.reasons[numbers[order[~is_kept]]] = NEAR

    def apply(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        """Yield the documents that stay, and count the others in `report`, which starts anew."""
        self.report = {}
        for number, (split, document) in enumerate(documents):
            if self.reasons[number] == KEEP:
                yield split, document
                continue
            entry = self.report.setdefault(
                self.names[self.reasons[number]], {"count": 0, "examples": []}
            )
            entry["count"] += 1
            if len(entry["examples"]) < N_EXAMPLES:
                entry["examples"].append(document.text[:EXAMPLE_CHARS])

    def summary(self) -> str:
        """What was dropped, as one line."""
        counts = Counter(self.names[reason] for reason in self.reasons.tolist() if reason != KEEP)
        total, n = sum(counts.values()), len(self.reasons)
        parts = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        return f"cleaning: dropped {total:,} of {n:,} documents ({total / max(n, 1):.1%}){': ' if parts else ''}{parts}"
