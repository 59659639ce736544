"""Padding, cut documents and loss with each packing, on stories and on the functions of Python's
standard library."""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from thinker.benchmarks.losses.regularization import train_quietly
from thinker.data.batches.windows import PackedDataset
from thinker.data.text.sources import open_source
from thinker.data.tokenizers.text_bytes import token_byte_lengths
from thinker.evaluation.loss import Evaluator
from thinker.interop.load import load
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
PACKINGS = ("contiguous", "documents", "best_fit")
SHAPE = ["model.d_model=96", "model.n_layers=3", "model.n_heads=3", "data.tokenizer=bpe:2048", "data.val_fraction=0.05",
         "train.max_minutes=null", "train.batch_size=16", "train.eval_every=null", "train.save_every=null",
         "train.sample_every=null", "train.compile=false"]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--seq-len", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="targets to train on")
    parser.add_argument("--seeds", type=int, default=3, help="runs per packing, with seeds 1 to N")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/packing"),
        help="folder for runs; finished runs are reused",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pack both corpora in each way, train on the same number of targets, and print a table."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    functions = arguments.folder / "functions.jsonl"
    if not functions.exists():
        functions.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in _functions()), encoding="utf-8"
        )
    corpora = {"stories": ["data.source=tales"], "functions": [
        "data.source=jsonl", f"data.path={functions}", "data.max_documents=null"]}  # fmt: skip
    rows = []
    print(f"{'corpus':10} {'packing':11} {'padding':>8} {'cut documents':>14} {'loss':>15}")
    for corpus, data in corpora.items():
        for packing in PACKINGS:
            overrides = [*SHAPE, *data, f"data.packing={packing}", f"data.seq_len={arguments.seq_len}",
                         f"data.cache_dir={arguments.folder}/cache"]  # fmt: skip
            row = {"corpus": corpus, "packing": packing} | _measure(overrides, arguments)
            rows.append(row)
            print(f"{corpus:10} {packing:11} {row['padding']:8.2%} {row['cut']:14.1%} "
                  f"{row['loss']:9.4f} ±{row['spread']:.4f}", flush=True)  # fmt: skip
    return {
        "seq_len": arguments.seq_len,
        "tokens": arguments.tokens,
        "seeds": arguments.seeds,
        "rows": rows,
    }


def _measure(overrides: list[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Shares of padding and of cut documents; mean and standard deviation of the loss over the
    seeds."""
    config = load_config(CONFIG, [*overrides, "train.max_steps=1"])
    train = prepare_training_data(config).train
    windows = PackedDataset(train, config.data.seq_len, config.data.packing)
    n_targets = train.n_tokens - len(train.shards)
    fill = n_targets / (len(windows) * config.data.seq_len)
    offsets = train.shards[0].offsets[:]  # both corpora have one shard
    ends = np.array([end for i in range(len(windows)) for _, end in windows.spans(i)[1]])
    cut = np.unique(
        np.searchsorted(offsets, np.setdiff1d(ends, offsets), side="right")
    )  # documents
    steps = round(arguments.tokens / (fill * config.train.batch_size * config.data.seq_len))
    losses = []
    for seed in range(1, arguments.seeds + 1):
        name = "-".join(
            [
                Path(config.data.path or "tales").stem,
                config.data.packing,
                str(seed),
                str(arguments.tokens),
            ]
        )
        run = [f"run.dir={arguments.folder}/{name}", f"run.seed={seed}", f"train.max_steps={steps}"]
        losses.append(_train(load_config(CONFIG, [*overrides, *run])))
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    shares = {"padding": 1 - fill, "cut": len(cut) / train.n_documents, "steps": steps}
    return shares | {"loss": statistics.fmean(losses), "spread": spread}


def _train(config: Config) -> float:
    """Train quietly, unless the run is finished. Returns the loss on whole validation documents, in
    nats per token."""
    train_quietly(config)
    model, tokenizer = load(config.run.dir)
    windows = PackedDataset(prepare_training_data(config).val, config.data.seq_len, "documents")
    return Evaluator(windows, 16, token_byte_lengths(tokenizer))(model).loss


def _functions() -> list[str]:
    """The top-level functions, classes and other parts of the standard library, which two empty
    lines separate."""
    modules = (document.text for document in open_source("pysource").documents())
    parts = (part.strip() for module in modules for part in re.split(r"\n{3,}", module))
    return [part for part in parts if len(part) > 40]
