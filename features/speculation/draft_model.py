"""Drafts by a smaller model with the same tokenizer."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.plain_decoder import PlainDecoder
from thinker.generation.decoders.prefill import read_prompts
from thinker.generation.drafting import max_draft_len
from thinker.generation.sampler import sample_tokens
from thinker.generation.sequence import Sequence
from thinker.model import KVCache, Thinker


class DraftModel:
    """Samples a smaller model with the same random numbers (Leviathan et al. 2023,
    arXiv:2211.17192).

    See Drafter.
    """

    def __init__(self, model: Thinker, max_len: int, caches: CacheFactory) -> None:
        self.model = model
        self.max_len = max_len
        self.caches = caches
        self.cache: KVCache | None = None

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Draft `max_len` tokens per sequence, fewer near its end."""
        drafts: list[list[int]] = [[] for _ in sequences]
        n_remaining = max(sequence.n_remaining for sequence in sequences)
        length = min(self.max_len, max_draft_len(self.model.config, sequences), n_remaining - 1)
        if length < 1:
            return drafts
        if self.cache is None:
            self.cache, _ = read_prompts(
                PlainDecoder(self.model), self.caches, sequences, self.max_len, self.max_len
            )
        unread = self._forget_rejected(sequences)
        for _ in range(length):
            last = self._read(unread)  # (B, V)
            last[:, sequences[0].tokenizer.vocab_size :] = -torch.inf
            sampled = sample_tokens(list(zip(sequences, drafts)), last)
            for draft, token in zip(drafts, sampled):
                draft.append(token)
            unread = [[token] for token in sampled]
        for draft, sequence in zip(drafts, sequences):
            del draft[max(0, sequence.n_remaining - 1) :]
        return drafts

    def _forget_rejected(self, sequences: list[Sequence]) -> list[list[int]]:
        """Drop drafts that were rejected. Returns the tokens of each sequence that are not read."""
        kept = []
        for n_read, sequence in zip(self.cache.lengths, sequences):
            kept.append(min(n_read, len(sequence.tokens) - 1))
        self.cache.truncate(kept)
        return [sequence.tokens[n:] for n, sequence in zip(kept, sequences)]

    def _read(self, unread: list[list[int]]) -> Tensor:
        """Read tokens of each sequence, one at least. Returns the logits after the last, (B, V)."""
        rows = [torch.tensor(tokens, device="cpu") for tokens in unread]
        batch = pad_sequence(rows, batch_first=True)  # (B, width)
        logits = self.model(batch.to(self.model.device), cache=self.cache)  # (B, width, V)
        width = batch.shape[1]
        lengths = []
        for n_read, tokens in zip(self.cache.lengths, unread):
            lengths.append(n_read - width + len(tokens))  # without the padding
        self.cache.truncate(lengths)
        last = [len(tokens) - 1 for tokens in unread]
        return logits[range(len(unread)), last].float()

    def select(self, rows: list[int]) -> None:
        """Keep only the sequences at these indices of the batch."""
        if self.cache is not None:
            self.cache.select(rows)
