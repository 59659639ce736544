"""A text that the user and the model write in turns, with a KV cache that is kept between turns."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from thinker.data.tokenizers.common_prefix import common_prefix
from thinker.generation.command.terminal import describe_context_end, describe_unmet
from thinker.generation.engine import Generator
from thinker.generation.sampling_params import SamplingParams, check_text
from thinker.generation.sequence import Completion, Sequence, kept_when_sliding
from thinker.model import KVCache


class Conversation:
    """The text so far as token ids, and its cache, which is rebuilt if it has evicted positions.

    If the Generator slides, a text longer than the context slides as in one call, regardless of
    turns.
    """

    greeting = "Type the beginning of a text; /help lists the commands."
    description = (
        "Each line that you type, even an empty one, is appended to the text, "
        "and the model continues it."
    )
    continues_text = True  # user and model write the same text
    kind = "text"  # for messages about files

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

    def state(self) -> dict[str, Any]:
        """What is saved of the conversation, as JSON values; the cache is saved apart."""
        return {"tokens": self.tokens, "turn_starts": self.turn_starts}

    def restore(self, state: dict[str, Any], cache: KVCache | None, read: list[int]) -> None:
        """Go on from what state() returned. `cache`: filled with the tokens `read`, or None."""
        self.tokens = state["tokens"]
        self.turn_starts = state["turn_starts"]
        self._cache = cache
        self._read = [*read, 0]  # the last one counts as not read

    @property
    def cache_len(self) -> int:
        """Positions of the cache. One without a ring buffer needs no more."""
        generator = self.generator
        return generator.config.max_seq_len + generator.max_drafts + 1

    def filled_cache(self) -> tuple[KVCache, list[int]] | None:
        """The cache and the tokens that it has read; None before the first turn."""
        if self._cache is None or not self._read:
            return None
        return self._cache, self._read[: self._cache.lengths[0]]

    @property
    def text(self) -> str:
        """The whole text, without special tokens."""
        return self.generator.tokenizer.decode(self.tokens)

    def reply(self, text: str, params: SamplingParams) -> Iterator[str]:
        """Append `text` and yield the continuation.

        Raises UserError, with nothing changed, if it does not fit.
        """
        tokenizer = self.generator.tokenizer
        continues = self.tokens != tokenizer.bos_prefix
        new = tokenizer.encode(check_text(text, "the text"), continues=continues)
        tokens = self.tokens + new
        if not tokens:
            tokens = [tokenizer.bos_id]
        sequence = self._continue(tokens, params)
        self.turn_starts.append(len(self.tokens))
        try:
            yield from self._decode(sequence)
        finally:
            self.tokens = sequence.forgotten + sequence.tokens
            if sequence.completion.token_ids and self.tokens[-1] in tokenizer.eos_ids:
                self.tokens.pop()  # the user continues the same text

    def _continue(self, tokens: list[int], params: SamplingParams) -> Sequence:
        """A sequence that continues a text, of which `tokens` beyond self.tokens are new.

        Raises UserError if it does not fit.
        """
        context_len = self.generator.context_len
        n_forgotten = 0
        if self.generator.slide and len(tokens) > context_len:
            per_slide = context_len + 1 - kept_when_sliding(context_len)
            n_slides = math.ceil((len(tokens) - context_len) / per_slide)
            n_forgotten = min(n_slides * per_slide, len(self.tokens))
        completion = Completion("", n_slides=int(n_forgotten > 0))
        sequence = self.generator.new_sequence(0, completion, params, tokens[n_forgotten:])
        sequence.forgotten = tokens[:n_forgotten]
        return sequence

    def undo(self) -> bool:
        """Remove the last turn of user and model. Returns False if there is none."""
        if not self.turn_starts:
            return False
        del self.tokens[self.turn_starts.pop() :]
        return True

    def news(self) -> Iterator[str]:
        """Yield a line per event at the end of the context in the last turn, and if it was cut.

        Each event is told once per text.
        """
        completion = self._last.completion
        max_new_tokens = self._last.params.max_new_tokens
        lines = describe_context_end(self.generator, [completion], max_new_tokens)
        yield from (line for name, line in lines.items() if name not in self._said)
        self._said |= lines.keys()
        yield from describe_unmet([completion])

    def _decode(self, sequence: Sequence) -> Iterator[str]:
        self._last = sequence
        return (piece for _, piece in self.generator.decode_all([sequence], self._prefill))

    def _prefill(self, sequences: list[Sequence]) -> tuple[KVCache, Tensor]:
        """Read the tokens of the one sequence that are not in the cache.

        Returns the cache and logits (1, 1, V).
        """
        generator = self.generator
        cache = self._cache
        (sequence,) = sequences
        tokens = sequence.tokens
        n_cached = common_prefix(self._read[:-1], tokens[:-1])  # the last token has to be read
        if n_cached < generator.config.prefix:
            n_cached = 0  # a bidirectional prefix must be read in one pass
        self._read = []  # invalid until the passes are done
        if cache is None or not cache.can_truncate([n_cached]):
            cache = generator.new_cache(1, self.cache_len)
            n_cached = 0
        cache.truncate([n_cached])
        logits = generator.prefill([tokens[n_cached:]], cache)
        self._cache = cache
        self._read = tokens  # both grow with every sampled token
        return cache, logits
