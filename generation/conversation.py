"""One text that a person and the model write in turns, on a cache that is kept between them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from thinker.generation.engine import Generator
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion


class Conversation:
    """The text so far, as tokens; what the cache knows of it is never computed again.

    An interrupted turn keeps what was said until then. Where the cache cannot go back (a rolling one that has
    n_evicted), it is read anew.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.tokens = list(generator.tokenizer.bos_prefix)
        self.turns: list[int] = []  # the number of tokens before each turn
        self._cache = None
        self._known = 0  # tokens of the text that the cache holds for certain

    @property
    def text(self) -> str:
        """All of it, without special tokens."""
        return self.generator.tokenizer.decode(self.tokens)

    def say(self, text: str, params: SamplingParams, completion: Completion | None = None) -> Iterator[str]:
        """Add `text`, then what the model continues it with, given out as it comes.

        Raises UserError, with nothing changed, where the text does not fit the context.
        """
        generator = self.generator
        added = generator.tokenizer.encode(text)
        tokens = self.tokens + added or [generator.tokenizer.bos_id]
        generator.check_length(tokens)
        completion = completion or Completion(text)
        row = generator.new_row(0, completion, params, list(tokens))
        self.turns.append(len(self.tokens))
        self.tokens = row.tokens  # grows with what is drawn, so that an interruption keeps it
        try:
            self._known, known = 0, self._known
            logits = self._catch_up(tokens, known)
            for _, piece in generator.decode([row], self._cache, logits):
                yield piece
        finally:
            if len(row.tokens) > len(tokens):
                self._known = len(row.tokens) - 1  # the last one drawn was not fed, or not for certain
            if row.tokens[-1] in generator.tokenizer.eos_ids and len(row.tokens) > len(tokens):
                row.tokens.pop()  # the person goes on with the same text

    def undo(self) -> bool:
        """Take back the last turn, the person's text and the model's. Returns whether there was one."""
        if not self.turns:
            return False
        del self.tokens[self.turns.pop() :]
        self._known = min(self._known, len(self.tokens))
        return True

    def reset(self) -> None:
        """Begin a new text."""
        self.tokens, self.turns, self._known = list(self.generator.tokenizer.bos_prefix), [], 0

    def _catch_up(self, tokens: list[int], known: int) -> Tensor:
        """Feed what the cache does not hold yet; returns the logits after the last token, (1, 1, V)."""
        generator, cache = self.generator, self._cache
        known = min(known, len(tokens) - 1)  # one at least is fed, for its logits
        if known < generator.config.prefix:
            known = 0  # what is read both ways is read at once
        if cache is not None and not cache.can_truncate([known]):
            cache = None
        if cache is None:
            capacity = generator.config.max_seq_len + generator.speculate + 1  # a ring is smaller than that
            cache, known = generator.new_cache(generator.model, 1, capacity), 0
        cache.truncate([known])
        self._cache = cache
        return generator.feed(generator.model, [tokens[known:]], cache)[:, None]
