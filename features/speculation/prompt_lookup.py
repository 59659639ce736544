"""Drafts from the text itself: what followed the last time that it ended like this."""

import itertools
import operator

from thinker.generation.sequence import Sequence

NGRAM_SIZES = (4, 3, 2, 1)  # lengths of the text's ending to look up, longest first


class PromptLookup:
    """Drafts what followed the last occurrence of the text's ending (see Drafter).

    This is "prompt lookup decoding" (Saxena 2023). It helps with repetitive text: code, names,
    lists. Drafts grow while they are accepted, and shrink when they are not.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.indexes: dict[int, _NgramIndex] = {}  # by index of the sequence

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Draft 0 to `max_len` tokens per sequence."""
        drafts = []
        for sequence in sequences:
            if sequence.index not in self.indexes:
                self.indexes[sequence.index] = _NgramIndex(self.max_len)
            drafts.append(self.indexes[sequence.index].propose(sequence))
        return drafts

    def select(self, rows: list[int]) -> None:
        """Do nothing: n-grams are stored by the index of the sequence."""


class _NgramIndex:
    """Position after the last occurrence of each n-gram of a text."""

    def __init__(self, max_len: int) -> None:
        self.next_position: dict[tuple[int, ...], int] = {}  # n-gram: position of the token after
        self.n_indexed = 0  # tokens in the index
        self.max_len = max_len
        self.length = max_len  # of the next draft
        self.draft: list[int] = []
        self.draft_start = 0

    def propose(self, sequence: Sequence) -> list[int]:
        tokens = sequence.tokens
        if self.draft:
            self._adapt_length(tokens)
        for end in range(self.n_indexed + 1, len(tokens)):  # the last token has no successor yet
            for n in NGRAM_SIZES:
                if n <= end:
                    self.next_position[tuple(tokens[end - n : end])] = end
        self.n_indexed = max(0, len(tokens) - 1)
        start = self._find(tokens)
        length = max(0, min(self.length, sequence.n_remaining - 1))
        self.draft = tokens[start : start + length]
        self.draft_start = len(tokens)
        return self.draft

    def _adapt_length(self, tokens: list[int]) -> None:
        """Draft more if the last draft was accepted, or what it was worth plus one."""
        matches = map(operator.eq, self.draft, tokens[self.draft_start :])
        n_accepted = sum(itertools.takewhile(bool, matches))
        if n_accepted == len(self.draft):
            self.length = min(2 * self.length, self.max_len)
        else:
            self.length = n_accepted + 1

    def _find(self, tokens: list[int]) -> int:
        """Where the text went on after its longest known ending; its end if there is none."""
        for n in NGRAM_SIZES:
            position = self.next_position.get(tuple(tokens[-n:]))
            if position is not None:
                return position
        return len(tokens)
