"""Speculative decoding: drafts of tokens to verify in one pass. They never change the text (see sample_next())."""

import itertools
import operator
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.generation.batch_sampling import sample_tokens
from thinker.generation.sequence import Sequence
from thinker.model import KVCache, Thinker, ThinkerConfig

NGRAM_SIZES = (4, 3, 2, 1)  # lengths of the text's ending to look up, longest first


class PromptLookup:
    """Drafts what followed the last occurrence of the text's ending ("prompt lookup decoding", Saxena 2023).

    Helps with repetitive text: code, names, lists. Drafts grow while they are accepted, and shrink when they are not.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.indexes: dict[int, _NgramIndex] = {}

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Draft 0 to `max_len` tokens per sequence."""
        return [
            self.indexes.setdefault(one.index, _NgramIndex(self.max_len)).propose(one)
            for one in sequences
        ]

    def select(self, indices: list[int]) -> None:
        """Do nothing: n-grams are stored by the index of the sequence."""


class _NgramIndex:
    """Position after the last occurrence of each n-gram of a text."""

    def __init__(self, max_len: int) -> None:
        self.next_position: dict[
            tuple[int, ...], int
        ] = {}  # n-gram: position of the token after it
        self.n_indexed = 0  # tokens in the index
        self.max_len = self.length = max_len  # of the next draft
        self.draft, self.draft_start = [], 0

    def propose(self, sequence: Sequence) -> list[int]:
        tokens = sequence.tokens
        if self.draft:
            matches = map(operator.eq, self.draft, tokens[self.draft_start :])
            n_accepted = sum(itertools.takewhile(bool, matches))
            all_accepted = n_accepted == len(self.draft)
            self.length = min(2 * self.length, self.max_len) if all_accepted else n_accepted + 1
        for end in range(self.n_indexed + 1, len(tokens)):  # the last token has no successor yet
            for n in NGRAM_SIZES:
                if n <= end:
                    self.next_position[tuple(tokens[end - n : end])] = end
        self.n_indexed = max(0, len(tokens) - 1)
        positions = (self.next_position.get(tuple(tokens[-n:])) for n in NGRAM_SIZES)
        start = next((position for position in positions if position is not None), len(tokens))
        length = max(0, min(self.length, sequence.n_remaining - 1))
        self.draft, self.draft_start = tokens[start : start + length], len(tokens)
        return self.draft


class DraftModel:
    """Drafts by sampling a smaller model with the same random numbers (Leviathan et al. 2023, arXiv:2211.17192)."""

    def __init__(
        self, model: Thinker, max_len: int, prefill: Callable[..., tuple[KVCache, Tensor]]
    ) -> None:
        # prefill(model, sequences, slack) returns a cache of the sequences and the logits after them.
        self.model, self.max_len, self.prefill = model, max_len, prefill
        self.cache: KVCache | None = None

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Draft `max_len` tokens per sequence, fewer near its end."""
        drafts: list[list[int]] = [[] for _ in sequences]
        n_remaining = max(sequence.n_remaining for sequence in sequences)
        length = min(self.max_len, max_draft_len(self.model.config, sequences), n_remaining - 1)
        if length < 1:
            return drafts
        if self.cache is None:
            self.cache, _ = self.prefill(self.model, sequences, self.max_len)
        cache = self.cache
        cache.truncate(
            [min(n, len(sequence.tokens) - 1) for n, sequence in zip(cache.lengths, sequences)]
        )
        unread = [sequence.tokens[n:] for sequence, n in zip(sequences, cache.lengths)]
        for _ in range(length):
            rows = [torch.tensor(tokens, device="cpu") for tokens in unread]
            batch = pad_sequence(rows, batch_first=True)  # (B, width)
            logits = self.model(batch.to(self.model.device), cache=cache)  # (B, width, V)
            cache.truncate(
                [n - batch.shape[1] + len(tokens) for n, tokens in zip(cache.lengths, unread)]
            )
            last = logits[
                range(len(sequences)), [len(tokens) - 1 for tokens in unread]
            ].float()  # (B, V)
            last[:, sequences[0].tokenizer.vocab_size :] = -torch.inf
            sampled = sample_tokens(list(zip(sequences, drafts)), last)
            for draft, token in zip(drafts, sampled):
                draft.append(token)
            unread = [[token] for token in sampled]
        return [
            draft[: max(0, sequence.n_remaining - 1)] for sequence, draft in zip(sequences, drafts)
        ]

    def select(self, indices: list[int]) -> None:
        """Keep only the sequences at these indices of the batch."""
        if self.cache is not None:
            self.cache.select(indices)


def max_draft_len(config: ThinkerConfig, sequences: list[Sequence]) -> int:
    """Number of drafts that fit after the longest sequence, to which all are padded."""
    if config.positions == "learned" or config.max_cached_len < config.max_seq_len:
        return max(0, config.max_cached_len - max(len(sequence.tokens) for sequence in sequences))
    return sys.maxsize
