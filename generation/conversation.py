"""A text that the user and the model write in turns; its KV cache is kept from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from thinker.generation.engine import Generator
from thinker.generation.prompts import check_text
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion


class Conversation:
    """The text so far as token ids, and a cache; one that cannot go back (it has evicted positions) is made anew.

    An interrupted turn keeps the tokens sampled until then.
    """

    greeting = "Type the beginning of a text; /help lists the commands."
    description = "Whatever you type is appended to the text, and the model continues it; an empty line: just that."
    continues_text = True  # what the user writes and what the model writes are one text

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._cache = None
        self.reset()

    def reset(self) -> None:
        """Start a new text."""
        self.tokens = list(self.generator.tokenizer.bos_prefix)
        self.turn_starts: list[int] = []  # the number of tokens before each turn
        self._n_cached = 0  # tokens of the text that the cache certainly holds

    @property
    def text(self) -> str:
        """The whole text, without special tokens."""
        return self.generator.tokenizer.decode(self.tokens)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Append `text`, then yield the model's continuation; UserError, with nothing changed, if it does not fit."""
        tokens = self.tokens + self.generator.tokenizer.encode(check_text(text, "the text"))
        yield from self._continue(tokens or [self.generator.tokenizer.bos_id], text, params, len(self.tokens))

    def _continue(self, tokens: list[int], text: str, params: SamplingParams, n_equal: int) -> Iterator[str]:
        """Yield what follows `tokens`, whose first `n_equal` are those of the text so far."""
        generator = self.generator
        sequence = generator.new_sequence(0, Completion(text), params, tokens)
        sequence.n_after_sliding = 0  # /undo and /show need the whole text
        self.turn_starts.append(len(self.tokens))
        self.tokens = sequence.tokens  # grows with every sampled token, so an interruption keeps them
        try:
            n_cached, self._n_cached = min(self._n_cached, n_equal), 0
            logits = self._prefill(tokens, n_cached)
            for _, piece in generator.decode([sequence], self._cache, logits):
                yield piece
        finally:
            if len(sequence.tokens) > len(tokens):
                self._n_cached = len(sequence.tokens) - 1  # the model may not have read the last token yet
                if sequence.tokens[-1] in generator.tokenizer.eos_ids:
                    sequence.tokens.pop()  # the user continues the same text

    def undo(self) -> bool:
        """Remove the last turn, the user's text and the model's. Returns whether there was one."""
        if not self.turn_starts:
            return False
        del self.tokens[self.turn_starts.pop() :]
        self._n_cached = min(self._n_cached, len(self.tokens))
        return True

    def _prefill(self, tokens: list[int], n_cached: int) -> Tensor:
        """Read the tokens that the cache does not hold; returns the logits after the last one, (1, 1, V)."""
        generator, cache = self.generator, self._cache
        n_cached = min(n_cached, len(tokens) - 1)  # reads at least one token, for its logits
        if n_cached < generator.config.prefix:
            n_cached = 0  # tokens that attend to each other in both directions are read in one pass
        if cache is None or not cache.can_truncate([n_cached]):
            max_len = generator.config.max_seq_len + generator.speculate + 1  # a ring buffer is smaller than that
            self._cache, n_cached = generator.new_cache(generator.model, 1, max_len), 0
        self._cache.truncate([n_cached])
        return generator.prefill(generator.model, [tokens[n_cached:]], self._cache)
