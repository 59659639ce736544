"""Does a minute of training on `pysource` beat a bigram model of the same tokens?

    python benchmarks/bigram.py [--minutes 1]

Trains configs/pysource.yaml for that long on the CPU, counts bigrams in the same training tokens, and measures both on
the same validation windows. The bigram model is interpolated with the unigram one (Witten-Bell: the more kinds of
tokens have followed a token, the more weight the unigram model gets after it). One line of JSON at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from thinker.benchmarks.environment import finish
from thinker.data.batches import PackedDataset, sequential_batches
from thinker.data.shards import TokenShards
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.config import load_config
from thinker.training.trainer import Trainer


def bigram_loss(train: TokenShards, windows: PackedDataset, vocab_size: int, limit: int | None) -> float:
    """Nats a token of a Witten-Bell bigram model of `train` on the targets of `windows`."""
    pairs = np.zeros((vocab_size, vocab_size), dtype=np.int32)
    for shard in train.shards:
        tokens = np.asarray(shard.tokens, dtype=np.int64)
        np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    following = pairs.sum(1)  # (V,) how often each token was followed
    kinds = (pairs > 0).sum(1)  # (V,) by how many different ones
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + vocab_size)  # (V,)
    nats, count = 0.0, 0
    for inputs, targets in sequential_batches(windows, 64, limit):
        counted = targets != IGNORE_INDEX
        before, after = inputs[counted].numpy(), targets[counted].numpy()
        total = np.maximum(following[before] + kinds[before], 1)
        backoff = np.where(following[before] > 0, kinds[before] / total, 1.0)
        nats -= np.log(pairs[before, after] / total + backoff * unigram[after]).sum()
        count += len(after)
    return nats / count


def main() -> None:
    """Train, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--run", default="runs/bigram-peer", help="the run directory, to be trained if it is not there")
    arguments = parser.parse_args()
    config = load_config(
        Path(__file__).resolve().parents[1] / "configs" / "pysource.yaml",
        [f"run.dir={arguments.run}", f"train.max_minutes={arguments.minutes}", "train.device=cpu",
         "train.eval_every=null", "train.sample_every=null"],
    )  # fmt: skip
    trainer = Trainer(config)
    trainer.train()
    state = trainer.state
    ours = trainer.evaluator(trainer.model).loss
    peer = bigram_loss(
        trainer.corpus.train,
        trainer.evaluator.windows,
        trainer.corpus.tokenizer.vocab_size,
        config.train.eval_sequences,
    )
    print(f"thinker {ours:.4f}, bigram {peer:.4f} nats a token, after {state.elapsed_s:.0f} s, {state.tokens:,} tokens")
    result = {"benchmark": "bigram", "seconds": state.elapsed_s, "tokens": state.tokens, "loss": ours}
    finish(result | {"bigram_loss": peer})


if __name__ == "__main__":
    main()
