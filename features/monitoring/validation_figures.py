"""The figures of attention on the validation set of a run, which generation compares its own
with."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinker.data.corpus.shards import TokenShards
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.features.monitoring.monitor import FILE_NAME
from thinker.model import Thinker
from thinker.model.inspection.attention_statistics import figure_names, measure_text
from thinker.runtime.files import atomic_write

MAX_TEXTS, MAX_TOKENS = 64, 1 << 14  # read for the figures, but always at least 4 texts


def measure_validation(
    model: Thinker, tokens: TokenShards, tokenizer: Tokenizer, seq_len: int
) -> dict[str, Any]:
    """Mean and standard deviation of each figure over positions of the validation set.

    Texts are read one by one, as in generation. Positions 2^i to 2^(i + 1) - 1 are one group, as a
    later position has more keys to attend to; position 0, which has only itself, is left out.
    `model`: in evaluation mode, as measure_attention() wants it.
    """
    names, was_training = figure_names(len(model.blocks)), model.training
    sums = torch.zeros(
        2, len(names), seq_len.bit_length(), dtype=torch.float64
    )  # of values and squares, by group
    counts = torch.zeros(seq_len.bit_length(), dtype=torch.int64)
    n_texts = min(MAX_TEXTS, max(4, MAX_TOKENS // seq_len))
    model.eval()
    for text in validation_texts(tokens, tokenizer.bos_prefix, seq_len, n_texts):
        inputs = torch.tensor([text], device=model.device)  # (1, T)
        values = (
            measure_text(model, inputs, tokenizer.vocab_size)[:, 1:].double().cpu()
        )  # (N, T - 1)
        groups = torch.tensor([position.bit_length() - 1 for position in range(1, len(text))])
        counts += torch.bincount(groups, minlength=len(counts))
        sums.index_add_(2, groups, torch.stack((values, values.square())))
    model.train(was_training)
    counts = counts[counts > 0]  # the first groups
    means, squares = sums[..., : len(counts)] / counts
    stds = (squares - means.square()).clamp_min(0).sqrt()
    rows = zip(names, means.tolist(), stds.tolist())
    figures = {
        name: {"mean": mean, "std": std}
        for name, mean, std in rows
        if all(map(math.isfinite, mean + std))
    }
    return {"positions": int(counts.sum()), "figures": figures}


def validation_texts(
    tokens: TokenShards, bos_prefix: list[int], seq_len: int, n: int
) -> Iterator[list[int]]:
    """Up to n texts of 2 to seq_len tokens, at even distances: documents, or pieces of those that
    are longer.

    Each begins as a prompt does.
    """
    ends, seen = np.cumsum([shard.n_tokens for shard in tokens.shards]), set()
    for at in np.linspace(0, tokens.n_tokens - 1, n).astype(np.int64).tolist():
        index = int(np.searchsorted(ends, at, side="right"))
        shard = tokens.shards[index]
        offsets, at = shard.offsets[:], at - int(ends[index]) + shard.n_tokens
        document = min(int(np.searchsorted(offsets, at, side="right")) - 1, shard.n_documents - 1)
        begin, end = int(offsets[document]) + 1, int(offsets[document + 1])  # without the BOS token
        size = seq_len - len(bos_prefix)
        begin += max(0, at - begin) // size * size
        text = [*bos_prefix, *shard.tokens[begin : min(begin + size, end)].tolist()]
        if (index, begin) not in seen and len(text) > 1:
            seen.add((index, begin))
            yield text


def write_validation_figures(
    run: Path, step: int, model: Thinker, tokens: TokenShards, tokenizer: Tokenizer, seq_len: int
) -> None:
    """Measure the model of a step and store the figures with its run, atomically."""
    figures = {"step": step, **measure_validation(model, tokens, tokenizer, seq_len)}
    atomic_write(run / FILE_NAME, json.dumps(figures, indent=1) + "\n")
