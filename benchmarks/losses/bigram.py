"""A minute of training on pysource compared with a bigram model.

Trains configs/pysource.yaml on the CPU, counts bigrams in the same training tokens and evaluates
both on the same validation windows. The bigram model is interpolated with the unigram model by
Witten and Bell's rule: the more distinct tokens have followed a token, the more weight the unigram
model has after it.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from thinker.data.batches.windows import PackedDataset, sequential_batches
from thinker.data.corpus.shards import TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--minutes", type=float, default=1.0, help="training time in minutes")
    parser.add_argument(
        "--run", default="runs/bigram-baseline", help="run directory; a finished run is reused"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, count bigrams and compare the two losses."""
    config = load_config(
        Path(__file__).resolve().parents[2] / "configs" / "pysource.yaml",
        [f"run.dir={arguments.run}", f"train.max_minutes={arguments.minutes}", "train.device=cpu",
         "train.eval_every=null", "train.sample_every=null"],
    )  # fmt: skip
    trainer = build_trainer(config)
    trainer.train()
    loss = trainer.evaluator(trainer.model).loss
    corpus, state, windows = trainer.corpus, trainer.state, trainer.evaluator.windows
    baseline = bigram_loss(
        corpus.train, windows, corpus.tokenizer.vocab_size, config.train.eval_sequences
    )
    print(f"after {state.elapsed_s:.0f} s and {state.tokens:,} tokens, in nats per token:")
    print(f"thinker {loss:.4f}, bigram {baseline:.4f}")
    return {
        "seconds": state.elapsed_s,
        "tokens": state.tokens,
        "loss": loss,
        "bigram_loss": baseline,
    }


def bigram_loss(
    train: TokenShards, windows: PackedDataset, vocab_size: int, limit: int | None
) -> float:
    """Nats per token of a bigram model of `train`, on the targets of the first `limit` windows."""
    pair_counts = np.zeros((vocab_size, vocab_size), dtype=np.int32)
    for shard in train.shards:
        tokens = shard.tokens[:].astype(np.int64)
        np.add.at(pair_counts, (tokens[:-1], tokens[1:]), 1)
    n_followed = pair_counts.sum(1)  # (V,) how often each token was followed by another
    n_distinct = (pair_counts > 0).sum(1)  # (V,) by how many distinct ones
    unigram = (pair_counts.sum(0) + 1) / (pair_counts.sum() + vocab_size)  # (V,)
    nats, n_targets = 0.0, 0
    for inputs, targets in sequential_batches(windows, 64, limit):
        mask = targets != IGNORE_INDEX
        previous, current = inputs[mask].numpy(), targets[mask].numpy()
        total = np.maximum(n_followed[previous] + n_distinct[previous], 1)
        backoff = np.where(n_followed[previous] > 0, n_distinct[previous] / total, 1.0)
        nats -= np.log(pair_counts[previous, current] / total + backoff * unigram[current]).sum()
        n_targets += len(current)
    return nats / n_targets
