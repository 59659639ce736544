"""The needle test through a cache with a window, with and without retrieval of evicted blocks."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.evaluation.needle import MAX_PREFIXES_PER_BATCH
from thinker.model import KVCache, Thinker

CHUNK = 512  # positions per pass


@torch.no_grad()
def cached_log_probs(
    new_cache: Callable[[], KVCache], model: Thinker, context: list[int], values: list[list[int]]
) -> Tensor:
    """As needle.log_probs(), but the model reads the context once, into the cache of one row that new_cache() creates.

    The cache is then repeated for the different beginnings of the values.
    """
    prefixes = sorted({tuple(value[:-1]) for value in values})
    cache, after = new_cache(), {}
    for chunk in torch.tensor([context], device=model.device).split(CHUNK, dim=1):
        first = model(chunk, cache=cache, last_logits_only=True)  # (1, 1, V)
    for start in range(0, len(prefixes), MAX_PREFIXES_PER_BATCH):
        batch = prefixes[start : start + MAX_PREFIXES_PER_BATCH]
        rows = pad_sequence(
            [torch.tensor(prefix, dtype=torch.long) for prefix in batch], batch_first=True
        )
        logits = first.expand(len(batch), -1, -1)
        if rows.shape[1]:
            repeated = copy.deepcopy(cache)
            repeated.select([0] * len(batch))
            logits = torch.cat(
                (logits, model(rows.to(model.device), cache=repeated)), dim=1
            )  # (rows, T + 1, V)
        after |= zip(batch, logits.float().log_softmax(dim=-1).cpu())
    return torch.stack(
        [after[tuple(value[:-1])][range(len(value)), value].double().sum() for value in values]
    )
