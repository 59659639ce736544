"""Drafts: tokens that something cheaper than the model proposes, and the model verifies."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from thinker.generation.decoders.decoder import Decoder
from thinker.generation.ranking import top_logprobs
from thinker.generation.sampler import sample_tokens
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, ThinkerConfig
from thinker.runtime.device import to_device


class Drafter(Protocol):
    """Proposes tokens for the texts of one batch."""

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        """Tokens that may follow each sequence; none if it has no idea."""

    def select(self, rows: list[int]) -> None:
        """Keep only the sequences at these indices of the batch."""


class Drafting(Protocol):
    """Makes a drafter for each batch.

    Attributes:
        option: the option of Generator() that asks for drafts, for messages.
        max_len: tokens that are proposed per step at most.
    """

    option: str
    max_len: int

    def new_drafter(self) -> Drafter:
        """A drafter for a batch that begins."""


def decode_with_drafts(
    decoder: Decoder,
    drafter: Drafter,
    sequences: list[Sequence],
    cache: KVCache,
    logits: Tensor,
    observe: Callable[[list[Sequence], KVCache], None],
) -> Iterator[tuple[int, str]]:
    """As Generator.decode(): decode from logits (B, 1, V) until all sequences have ended.

    Yields (sequence.index, newly certain text). observe(sequences, cache) is called before a step.
    """
    drafts: list[list[int]] = [[] for _ in sequences]
    while True:
        sampled = sample_after_drafts(sequences, drafts, logits)
        unfinished = []
        for row, sequence in enumerate(sequences):
            n_before = len(sequence.tokens)
            text, has_ended = sequence.extend(sampled[row])
            completion = sequence.completion
            completion.drafted += len(drafts[row])
            new = sequence.tokens[n_before:]
            completion.accepted += sum(map(operator.eq, drafts[row], new))
            if text:
                yield sequence.index, text
            if not has_ended:
                unfinished.append(row)
        if not unfinished:
            return
        if len(unfinished) < len(sequences):
            sequences = [sequences[row] for row in unfinished]
            cache.select(unfinished)
            drafter.select(unfinished)
        observe(sequences, cache)
        with torch.no_grad():
            # Drops rejected drafts, and what was sampled after the end of a text.
            cache.truncate([len(sequence.tokens) - 1 for sequence in sequences])
            max_len = max_draft_len(decoder.model.config, sequences)
            drafts = [draft[:max_len] for draft in drafter.propose(sequences)]
            logits = _read(decoder, sequences, drafts, cache)


def _read(
    decoder: Decoder, sequences: list[Sequence], drafts: list[list[int]], cache: KVCache
) -> Tensor:
    """Read the newest token of each sequence and its draft.

    Returns the logits after the token and after each draft, (B, 1 + longest draft, V).
    """
    longest = max(len(draft) for draft in drafts)
    rows = []
    for sequence, draft in zip(sequences, drafts):
        padding = [0] * (longest - len(draft))
        rows.append([sequence.tokens[-1], *draft, *padding])
    tokens = to_device(rows, decoder.model.device)  # (B, 1 + longest)
    return decoder.step(tokens, cache)


def max_draft_len(config: ThinkerConfig, sequences: list[Sequence]) -> int:
    """Number of drafts that fit after the longest sequence, to which all are padded."""
    if config.positions == "learned" or config.max_cached_len < config.max_seq_len:
        longest = max(len(sequence.tokens) for sequence in sequences)
        return max(0, config.max_cached_len - longest)
    return sys.maxsize


@torch.no_grad()
def sample_after_drafts(
    sequences: list[Sequence], drafts: list[list[int]], logits: Tensor
) -> list[list[SampledToken]]:
    """Sample one token per sequence, and one more for each accepted draft.

    Every position is sampled from the model's own distribution, with the random number of that
    position. A draft is accepted if it equals the sampled token, so drafts never change the text,
    greedy or sampled.

    `drafts`: per sequence, the tokens that the model read after its last token. `logits`
    (B, 1 + longest draft, V): after the last token and each draft.
    """
    # N each: a place to sample after each draft, and before the first.
    indices: list[int] = []
    offsets: list[int] = []
    for index, draft in enumerate(drafts):
        for offset in range(len(draft) + 1):
            indices.append(index)
            offsets.append(offset)
    vocab_size = sequences[0].tokenizer.vocab_size  # ids above the tokenizer's are padding
    logits = logits[indices, offsets, :vocab_size].float()  # (N, V)
    contexts = []
    for index, offset in zip(indices, offsets):
        contexts.append((sequences[index], drafts[index][:offset]))
    tokens = sample_tokens(contexts, logits)
    logprobs = logits.log_softmax(dim=-1)  # (N, V)
    column = torch.tensor(tokens, device=logits.device)[:, None]
    token_logprobs = logprobs.gather(1, column)[:, 0].tolist()
    sampled: list[list[SampledToken]] = [[] for _ in sequences]
    for row, (index, offset) in enumerate(zip(indices, offsets)):
        before = [token for token, *_ in sampled[index]]
        if before == drafts[index][:offset]:  # all drafts so far were accepted
            top = top_logprobs(logprobs[row], sequences[index].params.logprobs)
            sampled[index].append((tokens[row], token_logprobs[row], top))
    return sampled
