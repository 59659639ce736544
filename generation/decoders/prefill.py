"""Read the prompts of a batch."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from thinker.generation.caches.cache_factory import CacheFactory
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.sequence import Sequence
from thinker.model import KVCache


@torch.no_grad()
def read_prompts(
    decoder: Decoder, caches: CacheFactory, sequences: list[Sequence], n_drafts: int, slack: int
) -> tuple[KVCache, Tensor]:
    """Read each distinct prompt once, equal lengths together.

    `n_drafts`: positions that drafts take beyond a text. `slack`: as in CacheFactory.new(). Returns
    a cache with a row per sequence, and the logits after each, (B, 1, V).
    """
    model = decoder.model
    lengths = [len(sequence.tokens) + sequence.n_remaining for sequence in sequences]
    max_len = max(lengths) + n_drafts
    caches.check_memory(model, len(sequences), max_len)

    texts = [tuple(sequence.tokens) for sequence in sequences]
    prompts = sorted(dict.fromkeys(texts), key=len)
    cache: KVCache | None = None
    logits = []
    for _, group in groupby(prompts, key=len):
        tokens = torch.tensor(list(group), device=model.device)  # (B, T)
        new = caches.new(model, len(tokens), max_len, slack)
        logits.append(decoder.prefill(tokens, new))
        if cache is None:
            cache = new
        else:
            cache.concat_rows(new)
    logits = torch.cat(logits)

    rows = [prompts.index(text) for text in texts]
    if rows != list(range(len(prompts))):
        cache.select(rows)
        logits = logits[rows]
    return cache, logits
