"""Validation loss with each option that reduces overfitting, alone and together, by number of
epochs and text."""

import argparse
import contextlib
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinker.checkpoint.run_directory import RunDirectory
from thinker.features.sweeps.seed_statistics import mean_and_interval
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.run import train

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "small-text.yaml"
VAL_FRACTION = 0.33
SEQ_LEN = 128
BATCH_SIZE = 8
BYTES_PER_TOKEN = 1.95
SHAPE = ["model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.dropout=0", "data.tokenizer=bpe:512",
         f"data.seq_len={SEQ_LEN}", f"data.val_fraction={VAL_FRACTION}", f"train.batch_size={BATCH_SIZE}",
         "train.max_minutes=null", "train.eval_every=null", "train.save_every=null", "train.sample_every=null",
         "data.shift_windows=false", "optimizer.weight_decay=0", "data.num_workers=0",
         "train.precision=fp32", "train.compile=false"]  # fmt: skip
EMA, SHIFT, DECAY = (
    ["train.ema_decay=0.98"],
    ["data.shift_windows=true"],
    ["optimizer.weight_decay=0.1"],
)
CAUTIOUS = [*DECAY, "optimizer.cautious_weight_decay=true"]
DROPOUTS = {1: 0.0, 4: 0.1, 16: 0.2}  # by the least number of epochs


class Trial(NamedTuple):
    """One training run of the table."""

    text: str
    epochs: int
    option: str
    seed: int


def options(epochs: int) -> dict[str, list[str]]:
    """The overrides of each option."""
    dropout = [
        f"model.dropout={next(p for least, p in reversed(DROPOUTS.items()) if epochs >= least)}"
    ]
    return {
        "none": [],
        "EMA of the weights": EMA,
        "shifted windows": SHIFT,
        "weight decay": DECAY,
        "cautious weight decay": CAUTIOUS,
        "dropout by epochs": dropout,
        "together": [*EMA, *SHIFT, *DECAY, *dropout],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("texts", nargs="+", type=Path, metavar="FILE", help="text files")
    parser.add_argument(
        "--characters",
        type=int,
        default=150_000,
        help="characters to read from each text (default: 150000)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        help="numbers of epochs (default: 1 4 16)",
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="runs per option, with seeds 1 to N (default: 5)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/regularization"),
        help="folder for runs; finished runs are reused",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all trials and print a table of mean losses, each with its difference from the run
    without options."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    trials: dict[Trial, list[str]] = {}
    for path in arguments.texts:
        text = path.read_text(encoding="utf-8")[: arguments.characters]
        if len(text) < arguments.characters:
            raise UserError(f"{path} has only {len(text)} characters; lower --characters")
        part = arguments.folder / f"{path.stem}-{arguments.characters}.txt"
        if not part.exists():
            part.write_text(text, encoding="utf-8")
        steps_per_epoch = (
            arguments.characters * (1 - VAL_FRACTION) / BYTES_PER_TOKEN / SEQ_LEN / BATCH_SIZE
        )
        for epochs in arguments.epochs:
            for option, overrides in options(epochs).items():
                for seed in range(1, arguments.seeds + 1):
                    trial = Trial(path.stem, epochs, option, seed)
                    folder = arguments.folder / "-".join(map(str, trial)).replace(" ", "-")
                    steps = f"train.max_steps={max(1, round(epochs * steps_per_epoch))}"
                    where = [
                        f"data.path={part}",
                        f"data.cache_dir={arguments.folder}/cache",
                        f"run.dir={folder}",
                    ]
                    trials[trial] = [*SHAPE, *where, f"run.seed={seed}", steps, *overrides]
    losses = train_in_processes(trials, arguments.jobs)
    rows = [
        summarize(losses, Trial(path.stem, epochs, option, 0))
        for path in arguments.texts for epochs in arguments.epochs for option in options(epochs)
    ]  # fmt: skip
    print(
        f"{'text':<12} {'epochs':>6}  {'option':<24} {'nats per byte':>13}  {'difference':>10} ± 95%"
    )
    for row in rows:
        print(f"{row['text']:<12} {row['epochs']:>6}  {row['option']:<24} {row['nats_per_byte']:13.4f}  "
              f"{row['difference']:+10.4f} ± {row['interval']:.4f}")  # fmt: skip
    return {"characters": arguments.characters, "seeds": arguments.seeds, "rows": rows}


def train_in_processes(trials: dict[Trial, list[str]], n_jobs: int) -> dict[Trial, float]:
    """Train in `n_jobs` processes that share the cores. Returns the last validation loss, in nats
    per byte."""
    threads = max(1, (os.cpu_count() or 1) // n_jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_jobs, context, torch.set_num_threads, (threads,)) as pool:
        futures = {trial: pool.submit(final_loss, overrides) for trial, overrides in trials.items()}
        bar = Progress(futures.items(), desc="training runs")
        return {trial: future.result() for trial, future in bar}


def final_loss(overrides: list[str]) -> float:
    """Train one run quietly, unless it is finished. Returns the last validation loss in nats per
    byte."""
    config = load_config(CONFIG, overrides)
    train_quietly(config)
    return list(_evaluations(RunDirectory(config.run.dir)))[-1] * math.log(2)


def train_quietly(config: Config) -> None:
    """Train one run without output, unless it is finished."""
    with (
        open(os.devnull, "w") as devnull,
        contextlib.redirect_stderr(devnull),
        contextlib.redirect_stdout(devnull),
    ):
        train(config)


def _evaluations(run: RunDirectory) -> Iterator[float]:
    return (line["val_bits_per_byte"] for line in run.read_metrics() if "val_bits_per_byte" in line)


def summarize(losses: dict[Trial, float], row: Trial) -> dict[str, Any]:
    """Mean over the seeds, and of the differences from no option of the same seed, with a 95%
    interval."""
    seeds = [trial.seed for trial in losses if trial._replace(seed=0) == row]
    differences = [
        losses[row._replace(seed=n)] - losses[row._replace(seed=n, option="none")] for n in seeds
    ]
    difference, interval = mean_and_interval(differences)
    values = {"text": row.text, "epochs": row.epochs, "option": row.option}
    mean = statistics.fmean(losses[row._replace(seed=n)] for n in seeds)
    return values | {"nats_per_byte": mean, "difference": difference, "interval": interval}
