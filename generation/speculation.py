"""Guesses at the next tokens, so that one pass of the model may confirm several; they never change what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thinker.generation.sequence import Row, draw_each
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.model.patterns import Linear
from thinker.runtime.errors import UserError

NGRAMS = (4, 3, 2, 1)  # tokens at the end of the text that must have stood together before, the longest match first


class PromptLookup:
    """Proposes what followed the last time the text ended as it does now (Saxena 2023, "prompt lookup decoding").

    Costs no second model; pays where a text repeats itself: code, names, quotations, lists. A row's drafts grow while
    they are accepted and shrink when they are not.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: dict[int, _Index] = {}

    def propose(self, rows: list[Row]) -> list[list[int]]:
        """For each row up to `length` tokens, perhaps none."""
        return [self.rows.setdefault(row.index, _Index(self.length)).propose(row) for row in rows]

    def select(self, kept: list[int]) -> None:
        """Nothing to do: what is known of a row goes by its index."""


class _Index:
    """Where each n-gram of one text was last followed by something, and from which token on."""

    def __init__(self, longest: int) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # tokens whose n-grams are in `after`
        self.longest = self.length = longest
        self.guess: list[int] = []
        self.guess_at = 0

    def propose(self, row: Row) -> list[int]:
        tokens = row.tokens
        if self.guess:
            came = tokens[self.guess_at :]
            right = next(
                (i for i, (a, b) in enumerate(zip(self.guess, came)) if a != b), min(len(self.guess), len(came))
            )
            self.length = min(2 * self.length, self.longest) if right == len(self.guess) else right + 1
        for end in range(self.indexed, len(tokens) - 1):  # the last token is followed by nothing yet
            for n in NGRAMS:
                if end + 1 >= n:
                    self.after[tuple(tokens[end + 1 - n : end + 1])] = end + 1
        self.indexed = max(0, len(tokens) - 1)
        start = next((self.after[key] for n in NGRAMS if (key := tuple(tokens[-n:])) in self.after), None)
        length = min(self.length, row.limit - 1)
        self.guess = [] if start is None or length < 1 else tokens[start : start + length]
        self.guess_at = len(tokens)
        return self.guess


class DraftModel:
    """Proposes what a smaller model would draw, by the same numbers (Leviathan et al. 2023, arXiv:2211.17192).

    Where the two models agree, so do the draws: each place's number in [0, 1) is shared.
    """

    def __init__(self, model: Thinker, length: int, prefill: Callable[[Thinker, list[Row], int], KVCache]) -> None:
        self.model, self.length, self.prefill = model, length, prefill
        self.cache: KVCache | None = None

    def propose(self, rows: list[Row]) -> list[list[int]]:
        """For each row `length` tokens, fewer near its limit."""
        drafts: list[list[int]] = [[] for _ in rows]
        longest = min(self.length, room(self.model.config, rows), max(row.limit - 1 for row in rows))
        if longest < 1:
            return drafts
        if self.cache is None:
            self.cache = self.prefill(self.model, rows, self.length)
        cache = self.cache
        cache.truncate([min(known, len(row.tokens) - 1) for known, row in zip(cache.lengths, rows)])
        waiting = [row.tokens[known:] for row, known in zip(rows, cache.lengths)]
        for _ in range(longest):
            width = max(map(len, waiting))
            batch = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in waiting])
            logits = self.model(batch.to(self.model.device), cache=cache)  # (B, width, V)
            cache.truncate([length - width + len(tokens) for length, tokens in zip(cache.lengths, waiting)])
            last = logits[range(len(rows)), [len(tokens) - 1 for tokens in waiting]].float()  # (B, V)
            last[:, rows[0].vocab_size :] = -torch.inf
            drawn = draw_each(list(zip(rows, drafts)), last)
            for draft, token in zip(drafts, drawn):
                draft.append(token)
            waiting = [[token] for token in drawn]
        return [draft[: max(0, row.limit - 1)] for row, draft in zip(rows, drafts)]

    def select(self, kept: list[int]) -> None:
        """Keep these rows only."""
        if self.cache is not None:
            self.cache.select(kept)


def room(config: ThinkerConfig, rows: list[Row]) -> float:
    """How many drafts may follow the longest text, whose width all are padded to: any number, unless positions end."""
    ends = config.positions == "learned" or config.max_cached_len < config.max_seq_len
    return config.max_cached_len - max(len(row.tokens) for row in rows) if ends else math.inf


def check_draft_model(model: Thinker, draft: Thinker, endless: bool) -> None:
    """Raises UserError where a draft model cannot propose for a model, whose texts may have no end."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the draft model has {draft.config.vocab_size} token ids and the model {model.config.vocab_size}; "
            "both must share one tokenizer"
        )
    if any(isinstance(layer, Linear) for layer in draft.config.patterns):
        raise UserError("a draft model takes back what it proposed, and the sums of a linear layer forget nothing")
    if draft.config.prefix > model.config.prefix:
        raise UserError(f"the draft model reads its first {draft.config.prefix} tokens both ways, more than the model")
    if not draft.config.is_unbounded and (endless or draft.config.max_cached_len < model.config.max_cached_len):
        raise UserError(
            f"the draft model's context is {draft.config.max_cached_len} tokens, shorter than the model's "
            f"{'texts, which have no end' if endless else model.config.max_cached_len}"
        )
