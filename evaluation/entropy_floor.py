"""The entropy floor: the lowest loss that a model can expect on a generated text."""

import numpy as np

from thinker.data.batches.windows import PackedDataset


def entropy_floor(dataset: PackedDataset, limit: int | None = None) -> float | None:
    """Entropy floor: -sum ln P / sum (tokens + 1) over the documents in the first `limit` windows,
    in nats per target.

    No model that sees each document from its start can have a lower expected loss on these windows.
    None if ln P is unknown, if a document is split (as with contiguous packing), or if a prefix has
    no loss.
    """
    shards = dataset.tokens.shards
    count = len(dataset) if limit is None else min(limit, len(dataset))
    has_whole_documents = dataset.packing == "documents"
    if dataset.packing == "best_fit":
        has_whole_documents = count == len(dataset)
    if not has_whole_documents or dataset.prefix_len > 1:
        return None
    if any(shard.log_probs is None for shard in shards):
        return None
    nats = 0.0
    targets = 0
    # Of the windows of each shard; best-fit windows are all counted, and so end with the shard.
    for number, shard in enumerate(shards):
        starts = dataset.starts.get(number, shard.offsets[-1:])
        end = starts[min(count, len(starts) - 1)]
        offsets = shard.offsets[:]
        n_documents = int(np.searchsorted(offsets, end))
        lengths = np.diff(offsets[: n_documents + 1])
        if (lengths > dataset.seq_len).any():
            return None
        nats -= float(shard.log_probs[:n_documents].sum())
        # The BOS token after an EOS token is not a target.
        targets += int(end) - shard.has_eos * n_documents
        count -= min(count, len(starts) - 1)
    return nats / targets


def format_excess(loss: float, floor: float, digits: int) -> str:
    """Compare a loss with the floor: "12.3% above", or "3.1 times" from a factor of 2."""
    ratio = loss / floor
    if ratio >= 2:
        return f"{ratio:.{digits}f} times"
    return f"{ratio - 1:.{digits}%} above"
