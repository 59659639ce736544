"""Speculative decoding: drafts of the next tokens, so that one pass of the model may confirm several.

Drafts never change the text (see sequence.sample_next).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from thinker.generation.sequence import Sequence, sample_tokens
from thinker.model import KVCache, Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

NGRAM_SIZES = (4, 3, 2, 1)  # tokens at the end of the text to find earlier in it, the longest match first


class PromptLookup:
    """Drafts what followed the last earlier occurrence of the text's ending (Saxena 2023, "prompt lookup decoding").

    Needs no second model; pays off where a text repeats itself: code, names, quotations, lists. The drafts of a
    sequence grow while they are accepted and shrink when they are not.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.indexes: dict[int, _NgramIndex] = {}

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Up to `max_len` tokens per sequence, perhaps none."""
        return [self.indexes.setdefault(one.index, _NgramIndex(self.max_len)).propose(one) for one in sequences]

    def select(self, indices: list[int]) -> None:
        """Do nothing: the n-grams of a sequence are stored by its index."""


class _NgramIndex:
    """What followed the last occurrence of each n-gram of one text."""

    def __init__(self, max_len: int) -> None:
        self.next_position: dict[tuple[int, ...], int] = {}  # n-gram: position of the token after it
        self.n_indexed = 0  # tokens whose n-grams are in the index
        self.max_len = self.length = max_len  # length: of the next draft
        self.draft: list[int] = []
        self.draft_start = 0

    def propose(self, sequence: Sequence) -> list[int]:
        tokens = sequence.tokens
        if self.draft:
            n_accepted = 0
            for drafted, token in zip(self.draft, tokens[self.draft_start :]):
                if drafted != token:
                    break
                n_accepted += 1
            all_accepted = n_accepted == len(self.draft)
            self.length = min(2 * self.length, self.max_len) if all_accepted else n_accepted + 1
        for end in range(self.n_indexed, len(tokens) - 1):  # nothing follows the last token yet
            for n in NGRAM_SIZES:
                if end + 1 >= n:
                    self.next_position[tuple(tokens[end + 1 - n : end + 1])] = end + 1
        self.n_indexed = max(0, len(tokens) - 1)
        length = min(self.length, sequence.n_remaining - 1)
        self.draft, self.draft_start = [], len(tokens)
        for n in NGRAM_SIZES:
            start = self.next_position.get(tuple(tokens[-n:]))
            if start is not None:
                self.draft = tokens[start : start + max(0, length)]
                break
        return self.draft


class DraftModel:
    """Drafts what a smaller model would sample (Leviathan et al. 2023, arXiv:2211.17192).

    Both models sample a position with the same random number, so they agree whenever their distributions do.
    """

    def __init__(self, model: Thinker, max_len: int, prefill: Callable[..., tuple[KVCache, Tensor]]) -> None:
        # prefill(model, sequences, slack) returns a cache that holds the sequences, and the logits after them.
        self.model, self.max_len, self.prefill = model, max_len, prefill
        self.cache: KVCache | None = None

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """`max_len` tokens per sequence, fewer near its end."""
        drafts: list[list[int]] = [[] for _ in sequences]
        n_remaining = max(sequence.n_remaining for sequence in sequences)
        length = min(self.max_len, max_draft_len(self.model.config, sequences), n_remaining - 1)
        if length < 1:
            return drafts
        if self.cache is None:
            self.cache, _ = self.prefill(self.model, sequences, self.max_len)
        cache = self.cache
        cache.truncate([min(n, len(sequence.tokens) - 1) for n, sequence in zip(cache.lengths, sequences)])
        unread = [sequence.tokens[n:] for sequence, n in zip(sequences, cache.lengths)]
        for _ in range(length):
            width = max(map(len, unread))
            batch = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in unread])
            logits = self.model(batch.to(self.model.device), cache=cache)  # (B, width, V)
            cache.truncate([n - width + len(tokens) for n, tokens in zip(cache.lengths, unread)])
            last = logits[range(len(sequences)), [len(tokens) - 1 for tokens in unread]].float()  # (B, V)
            last[:, sequences[0].vocab_size :] = -torch.inf
            sampled = sample_tokens(list(zip(sequences, drafts)), last)
            for draft, token in zip(drafts, sampled):
                draft.append(token)
            unread = [[token] for token in sampled]
        return [draft[: max(0, sequence.n_remaining - 1)] for sequence, draft in zip(sequences, drafts)]

    def select(self, indices: list[int]) -> None:
        """Keep only the sequences at these indices of the batch."""
        if self.cache is not None:
            self.cache.select(indices)


def max_draft_len(config: ThinkerConfig, sequences: list[Sequence]) -> float:
    """How many drafts fit after the longest sequence, to whose length all are padded; inf if positions never end."""
    if config.positions == "learned" or config.max_cached_len < config.max_seq_len:
        return config.max_cached_len - max(len(sequence.tokens) for sequence in sequences)
    return math.inf


def check_draft_model(model: Thinker, draft: Thinker, is_unbounded: bool) -> None:
    """Raise UserError if a draft model cannot draft for `model`; is_unbounded: its texts may have any length."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the draft model has {draft.config.vocab_size} token ids and the model {model.config.vocab_size}; "
            "both must share one tokenizer"
        )
    if any(layer.n_features for layer in draft.config.patterns):
        raise UserError("a draft model must drop rejected drafts, and a linear layer's state cannot be rolled back")
    if draft.config.prefix > model.config.prefix:
        raise UserError(
            f"the draft model's bidirectional prefix of {draft.config.prefix} tokens is longer than the model's"
        )
    if not draft.config.is_unbounded and (is_unbounded or draft.config.max_cached_len < model.config.max_cached_len):
        context = "texts, which have no end" if is_unbounded else model.config.max_cached_len
        raise UserError(
            f"the draft model's context is {draft.config.max_cached_len} tokens, shorter than the model's {context}"
        )
