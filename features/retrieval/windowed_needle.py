"""The needle test through a cache with a window, with and without retrieval of evicted blocks."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.evaluation.needle import MAX_PREFIXES_PER_BATCH, all_prefixes, sum_log_probs
from thinker.model import KVCache, Thinker

CHUNK = 512  # positions per pass


@torch.no_grad()
def cached_log_probs(
    new_cache: Callable[[], KVCache], model: Thinker, context: list[int], values: list[list[int]]
) -> Tensor:
    """As needle.log_probs(), but the model reads the context once, into a cache.

    new_cache() creates the cache, of one row. It is then repeated for the different beginnings of
    the values.
    """
    cache = new_cache()
    for chunk in torch.tensor([context], device=model.device).split(CHUNK, dim=1):
        first = model(chunk, cache=cache, last_logits_only=True)  # (1, 1, V)
    prefixes = all_prefixes(values)
    after = {}
    for start in range(0, len(prefixes), MAX_PREFIXES_PER_BATCH):
        batch = prefixes[start : start + MAX_PREFIXES_PER_BATCH]
        rows = [torch.tensor(prefix, dtype=torch.long) for prefix in batch]
        tokens = pad_sequence(rows, batch_first=True).to(model.device)  # (rows, T)
        logits = first.expand(len(batch), -1, -1)
        if tokens.shape[1] > 0:
            repeated = copy.deepcopy(cache)
            repeated.select([0] * len(batch))
            others = model(tokens, cache=repeated)
            logits = torch.cat((logits, others), dim=1)  # (rows, T + 1, V)
        after |= zip(batch, logits.float().log_softmax(dim=-1).cpu())
    return sum_log_probs(values, after)
