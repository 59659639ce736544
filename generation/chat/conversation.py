"""A text that the user and the model write in turns, with a KV cache that is kept between turns."""

import operator
from collections.abc import Iterator
from itertools import takewhile

from torch import Tensor

from thinker.features.structured_output.constraints import describe_unmet
from thinker.generation.engine import Generator
from thinker.generation.prompts import check_text
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Sequence
from thinker.generation.sliding import continue_text, decode_sliding, describe_context_end
from thinker.model import KVCache


class Conversation:
    """The text so far as token ids, and its cache, which is rebuilt if it has evicted positions.

    If the Generator slides, a text longer than the context slides as in one call, regardless of turns.
    """

    greeting = "Type the beginning of a text; /help lists the commands."
    description = "Each line that you type, even an empty one, is appended to the text, and the model continues it."
    continues_text = True  # user and model write the same text

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._cache: KVCache | None = None
        self._read: list[int] = []  # tokens in the cache, possibly without the last one
        self.reset()

    def reset(self) -> None:
        """Start a new text."""
        self.tokens = list(self.generator.tokenizer.bos_prefix)
        self.turn_starts: list[int] = []  # the number of tokens before each turn
        self._said: set[str] = set()

    @property
    def text(self) -> str:
        """The whole text, without special tokens."""
        return self.generator.tokenizer.decode(self.tokens)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Append `text` and yield the continuation. Raises UserError, with nothing changed, if it does not fit."""
        tokenizer = self.generator.tokenizer
        tokens = self.tokens + tokenizer.encode(check_text(text, "the text")) or [tokenizer.bos_id]
        sequence = continue_text(self.generator, tokens, len(self.tokens), params)
        self.turn_starts.append(len(self.tokens))
        try:
            yield from self._decode(sequence)
        finally:
            self.tokens = sequence.forgotten + sequence.tokens
            if sequence.completion.token_ids and self.tokens[-1] in tokenizer.eos_ids:
                self.tokens.pop()  # the user continues the same text

    def undo(self) -> bool:
        """Remove the last turn of user and model. Returns False if there is none."""
        if not self.turn_starts:
            return False
        del self.tokens[self.turn_starts.pop() :]
        return True

    def news(self) -> Iterator[str]:
        """Yield a line per event at the end of the context in the last turn, each once per text, and if it was cut."""
        lines = describe_context_end(
            self.generator, [self._last.completion], self._last.params.max_new_tokens
        )
        yield from (line for name, line in lines.items() if name not in self._said)
        self._said |= lines.keys()
        yield from describe_unmet([self._last.completion])

    def _decode(self, sequence: Sequence) -> Iterator[str]:
        self._last = sequence
        return (piece for _, piece in decode_sliding(self.generator, [sequence], self._prefill))

    def _prefill(self, sequences: list[Sequence]) -> tuple[KVCache, Tensor]:
        """Read the tokens of the one sequence that are not in the cache. Returns cache and logits (1, 1, V)."""
        generator, cache, tokens = self.generator, self._cache, sequences[0].tokens
        n_cached = sum(
            takewhile(bool, map(operator.eq, self._read[:-1], tokens[:-1]))
        )  # at least one must be read
        if n_cached < generator.config.prefix:
            n_cached = 0  # a bidirectional prefix must be read in one pass
        self._read = []  # invalid until the passes are done
        if cache is None or not cache.can_truncate([n_cached]):
            max_len = (
                generator.config.max_seq_len + generator.speculate + 1
            )  # a ring buffer is smaller than that
            cache, n_cached = generator.new_cache(generator.model, 1, max_len), 0
        cache.truncate([n_cached])
        logits = generator.prefill(generator.model, [tokens[n_cached:]], cache)
        self._cache, self._read = cache, tokens  # both grow with every sampled token
        return cache, logits
