"""Read the prompts of a batch."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TypeGuard

import torch
from torch import Tensor

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.decoder import Decoder, RowDecoder
from thinker.generation.sequence import Sequence
from thinker.model import KVCache
from thinker.model.inspection.open_hooks import has_open_hooks


@torch.no_grad()
def read_prompts(
    decoder: Decoder, caches: CacheFactory, sequences: list[Sequence], n_drafts: int, slack: int
) -> tuple[KVCache, Tensor]:
    """Read each distinct prompt once: equal lengths together, or all if the decoder packs rows.

    `n_drafts`: positions that drafts take beyond a text. `slack`: as in CacheFactory.new(). Returns
    a cache with a row per sequence, and the logits after each, (B, 1, V).
    """
    model = decoder.model
    lengths = [len(sequence.tokens) + sequence.n_remaining for sequence in sequences]
    max_len = max(lengths) + n_drafts
    caches.check_memory(model, len(sequences), max_len)

    texts = [tuple(sequence.tokens) for sequence in sequences]
    prompts = sorted(dict.fromkeys(texts), key=len)
    groups = [list(group) for _, group in groupby(prompts, key=len)]
    if len(groups) > 1 and _packs_rows(decoder, type(caches.new(model, 1, 1))):
        cache = caches.new(model, len(prompts), max_len, slack)
        logits = _read_packed(decoder, cache, prompts)
    else:
        cache = caches.new(model, len(groups[0]), max_len, slack)
        logits = decoder.prefill(torch.tensor(groups[0], device=model.device), cache)
        for group in groups[1:]:
            new = caches.new(model, len(group), max_len, slack)
            tokens = torch.tensor(group, device=model.device)  # (B, T)
            logits = torch.cat((logits, decoder.prefill(tokens, new)))
            cache.concat_rows(new)

    rows = [prompts.index(text) for text in texts]
    if rows != list(range(len(prompts))):
        cache.select(rows)
        logits = logits[rows]
    return cache, logits


def _packs_rows(decoder: Decoder, kind: type[KVCache]) -> TypeGuard[RowDecoder]:
    """Whether prompts of several lengths take the time of one.

    Kernels in C read rows, too, but they read prompts of one length faster. Whoever records
    activations expects prompts of one length.
    """
    if has_open_hooks(decoder.model):
        return False
    return not decoder.is_batch_invariant and decoder.reads_rows(kind)


def _read_packed(decoder: RowDecoder, cache: KVCache, prompts: list[tuple[int, ...]]) -> Tensor:
    """Read prompts of any lengths into the rows of a cache. Returns the logits after each, (B, 1,
    V)."""
    rows: list[int] = []
    tokens: list[int] = []
    ends: list[int] = []  # where the last token of each prompt is
    for row, prompt in enumerate(prompts):
        rows += [row] * len(prompt)
        tokens += prompt
        ends.append(len(tokens) - 1)
    n_passes = math.ceil(len(tokens) / decoder.tokens_per_step)
    n = math.ceil(len(tokens) / n_passes)  # so that no pass is small
    logits = []
    for start in range(0, len(tokens), n):
        part = slice(start, start + n)
        wanted = [end - start for end in ends if start <= end < start + n]
        logits.append(decoder.read(cache, rows[part], tokens[part], wanted))
    return torch.cat(logits)[:, None]
