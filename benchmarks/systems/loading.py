"""Tokens per second of one core that makes batches from a tokenized corpus, by packing and sequence
length."""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.dataset import ShuffledDataset
from thinker.data.batches.windows import PackedDataset
from thinker.data.corpus.corpus import prepare_corpus
from thinker.features.mixtures.mixed_dataset import MixedDataset
from thinker.features.mixtures.mixture import Mixture, MixtureSource

PACKINGS = ("contiguous", "documents", "best_fit")
BATCH_TOKENS = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("file", metavar="FILE", help="JSON lines with a column text")
    parser.add_argument("--tokenizer", default="bpe:32768", help="name or path of the tokenizer")
    parser.add_argument(
        "--cache-dir", default=".cache", metavar="FOLDER", help="folder of the token cache"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024, 2048], help="tokens per sequence"
    )
    parser.add_argument("--steps", type=int, default=60, help="batches of 65,536 tokens to time")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time batches of one source, and of a mixture of it with itself. Print a table."""
    torch.set_num_threads(1)
    tokens = prepare_corpus(
        source="jsonl",
        path=arguments.file,
        tokenizer=arguments.tokenizer,
        cache_dir=arguments.cache_dir,
    ).train
    rows = []
    for seq_len, packing in itertools.product(arguments.lengths, PACKINGS):
        dataset, batch_size = PackedDataset(tokens, seq_len, packing), BATCH_TOKENS // seq_len
        sources = [ShuffledDataset(dataset, 1, source=number) for number in range(2)]
        mixture = Mixture([MixtureSource({0: 0.7}), MixtureSource({0: 0.3})])
        loaders = {
            "one source": BatchLoader(sources[0], batch_size),
            "mixture": BatchLoader(MixedDataset(sources, mixture, [len(dataset)] * 2), batch_size),
        }
        for name, loader in loaders.items():
            rate = (
                batch_size
                * seq_len
                / statistics.median(_seconds(loader, step) for step in range(arguments.steps))
            )
            rows.append(
                {"seq_len": seq_len, "packing": packing, "sources": name, "tokens_per_second": rate}
            )
            print(f"{seq_len:5}  {packing:11}  {name:10}  {rate:13,.0f} tokens/s", flush=True)
    return {"file": Path(arguments.file).name, "tokens": tokens.n_tokens, "rows": rows}


def _seconds(loader: BatchLoader, step: int) -> float:
    start = time.perf_counter()
    loader.batch(step)
    return time.perf_counter() - start
