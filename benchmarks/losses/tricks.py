"""Tricks that may lower the loss of a short run: each at equal time, beside equal tokens.

The time of a step of each trick is measured in turns with a step of the defaults, and so is what
runs do before their first step. A run at equal time has as many steps fewer as these take longer.
So lengths are fixed before training starts, and other work on the machine changes no loss.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import time_alternately
from thinker.benchmarks.training_runs import ROOT, train_all
from thinker.data.batches.prefetch import Batch
from thinker.features.sweeps.seed_statistics import mean_and_interval
from thinker.runtime.backend import configure_backend
from thinker.runtime.device import choose_precision
from thinker.runtime.errors import UserError
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.processes.training_process import TrainingProcess
from thinker.training.run import build_trainer
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

DEFAULTS = "defaults"
PAIRS = "model.bigram_rows={five_vocabularies}"
TRICKS: dict[str, list[str]] = {
    DEFAULTS: [],
    "no fit to pairs": ["train.fit_bigrams=off"],
    "constant momentum": ["optimizer.momentum_warmup_steps=0"],
    "no fit, constant momentum": ["train.fit_bigrams=off", "optimizer.momentum_warmup_steps=0"],
    "value embeddings": ["model.value_embeddings=true"],
    "embedding of pairs": [PAIRS],
    "both": ["model.value_embeddings=true", PAIRS],
    "token shift": ["model.token_shift=true"],
    "logits capped at 15": ["model.logit_softcap=15"],
    "squared ReLU": ["model.mlp=ungated", "model.activation=relu2", "model.d_ff={four_widths}"],
    "cautious weight decay": ["optimizer.weight_decay=0.1", "optimizer.cautious_weight_decay=true"],
    "half the batch": ["train.batch_size=8"],
}


@dataclass(frozen=True)
class Size:
    """The shape of a model, and the seconds that the defaults train."""

    d_model: int
    n_layers: int
    n_heads: int
    seconds: float


SIZES = {"2m": Size(160, 4, 5, 120), "12m": Size(384, 6, 6, 600)}


@dataclass(frozen=True)
class Text:
    """A text to train on."""

    config: str  # in benchmarks/configs
    vocab_size: int


TEXTS = {"pysource": Text("pysource-default.yaml", 2048), "tales": Text("tales-default.yaml", 3072)}
BATCH_SIZE = 16  # the default


@dataclass(frozen=True)
class Cost:
    """Seconds of a run before its first step, and of some steps."""

    start: float
    steps: list[float]


START_ROUNDS = 3
BUDGETS = ("time", "tokens")  # what a trick and the defaults have in common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the model")
    parser.add_argument("--seeds", type=int, default=3, help="runs per trick, with seeds 1 to N")
    parser.add_argument("--only", nargs="+", metavar="TRICK", help="tricks to run (default: all)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="texts")
    parser.add_argument(
        "--budgets",
        nargs="+",
        choices=BUDGETS,
        default=list(BUDGETS),
        help="equal time, equal tokens, or both (default)",
    )
    parser.add_argument("--seconds", type=float, help="seconds that the defaults train")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each trick")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel, sharing the cores")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/tricks"),
        help="folder for runs and costs; finished runs and measured costs are reused",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of all tricks, train them, and print the differences from the defaults."""
    for name in ("seeds", "rounds", "jobs"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; use at least 1")
    seconds = arguments.seconds
    if seconds is None:
        seconds = SIZES[arguments.size].seconds
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds}; use a positive number")
    names = [DEFAULTS]
    for name in arguments.only or TRICKS:
        if name not in TRICKS:
            raise UserError(f"unknown trick {name!r}; choose from: {'; '.join(TRICKS)}")
        if name != DEFAULTS:
            names.append(name)
    rows = []
    for text in arguments.texts:
        costs = saved_costs(arguments, text, names, seconds)
        runs = plan_runs(arguments, text, costs, seconds)
        train_all(list(runs.values()), arguments.jobs)
        rows += compare(text, costs, runs, arguments)
    return {
        "size": arguments.size,
        "precision": common_precision(),
        "seconds": seconds,
        "seeds": arguments.seeds,
        "rows": rows,
    }


def saved_costs(
    arguments: argparse.Namespace, text: str, names: list[str], seconds: float
) -> dict[str, Cost]:
    """The costs of runs of `seconds`, from a file in the folder of the runs, which is written if it
    lacks one of them. So runs that were cut off have the same lengths as before."""
    path = arguments.folder / f"costs-{arguments.size}-{text}-{seconds:g}-{common_precision()}.json"
    costs = {}
    if path.exists():
        for name, values in json.loads(path.read_text(encoding="utf-8")).items():
            costs[name] = Cost(**values)
    if not costs.keys() >= set(names):
        costs = measure_costs(text, arguments.size, names, arguments.rounds, seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {name: asdict(cost) for name, cost in costs.items()}
        path.write_text(json.dumps(values), encoding="utf-8")
    return {name: costs[name] for name in names}


def measure_costs(
    text: str, size: str, names: list[str], rounds: int, seconds: float
) -> dict[str, Cost]:
    """The costs of runs of `seconds`, measured in turns."""
    step_times = time_steps(text, size, names, rounds)
    n_default = seconds / statistics.median(step_times[DEFAULTS])
    starts = time_starts(text, size, names, n_default)
    return {name: Cost(starts[name], times) for name, times in step_times.items()}


@cache
def common_precision() -> str:
    """The precision of all runs. It is measured, so each run for itself may choose another one."""
    return choose_precision("auto", torch.device("cpu"))


def overrides_of(name: str, text: str, size: str) -> list[str]:
    """The keys that a trick sets on a text, for a model of a size."""
    shape = SIZES[size]
    numbers = {"five_vocabularies": 5 * TEXTS[text].vocab_size, "four_widths": 4 * shape.d_model}
    overrides = [
        f"model.d_model={shape.d_model}",
        f"model.n_layers={shape.n_layers}",
        f"model.n_heads={shape.n_heads}",
        f"train.batch_size={BATCH_SIZE}",
        "train.eval_every=null",
        "train.compile=false",
        f"train.precision={common_precision()}",
    ]
    for override in TRICKS[name]:
        overrides.append(override.format(**numbers))
    return overrides


def config_of(name: str, text: str, size: str, more: Sequence[str] = ()) -> Config:
    """The config of a trick, with more overrides."""
    path = ROOT / "benchmarks" / "configs" / TEXTS[text].config
    return load_config(path, [*overrides_of(name, text, size), *more])


def time_steps(text: str, size: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of steps of each trick, measured in turns."""
    device = torch.device("cpu")
    configure_backend(device)
    steps = []
    for name in names:
        config = config_of(name, text, size)
        model_config = config.thinker_config(vocab_size=TEXTS[text].vocab_size)
        settings = resolve_settings(config, model_config, device)
        step = TrainingStep(build_model(model_config, 1, device), settings)
        shape = (config.train.batch_size, config.data.seq_len)
        tokens = torch.randint(1, model_config.vocab_size, shape)
        steps.append(partial(step, Batch(tokens, tokens, tokens.numel()), 1e-3))
    return dict(zip(names, time_alternately(steps, rounds, device)))


def time_starts(text: str, size: str, names: list[str], n_steps: float) -> dict[str, float]:
    """Seconds of training that runs of about `n_steps` steps have used before their first step:
    medians of START_ROUNDS in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(START_ROUNDS):
        for name in names:
            seconds[name].append(time_start(name, text, size, n_steps))
    return {name: statistics.median(times) for name, times in seconds.items()}


def time_start(name: str, text: str, size: str, n_steps: float) -> float:
    """See time_starts(); once, for one trick."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = [f"train.max_steps={max(1, round(n_steps))}", "train.max_minutes=null"]
        config = config_of(name, text, size, [*lengths, f"run.dir={folder}/run"])
        trainer = build_trainer(config)
        trainer.batches.close()
        trainer.run.unlock()
        return trainer.state.elapsed_s


def relative_time(costs: dict[str, Cost], name: str) -> float:
    """The time of a step of a trick, divided by that of the defaults: the median of all rounds."""
    pairs = zip(costs[name].steps, costs[DEFAULTS].steps)
    return statistics.median(own / default for own, default in pairs)


def run_lengths(costs: dict[str, Cost], name: str, seconds: float, share: float) -> dict[str, int]:
    """The number of steps of a trick, by budget.

    share: the sequences of its steps, divided by those of the defaults.
    """
    default_step = statistics.median(costs[DEFAULTS].steps)
    n_default = (seconds - costs[DEFAULTS].start) / default_step
    own_step = default_step * relative_time(costs, name)
    n_steps = {"time": (seconds - costs[name].start) / own_step, "tokens": n_default / share}
    return {budget: max(1, round(n)) for budget, n in n_steps.items()}


def plan_runs(
    arguments: argparse.Namespace, text: str, costs: dict[str, Cost], seconds: float
) -> dict[tuple[str, str, int], TrainingProcess]:
    """A run for each trick, budget and seed, as long as the defaults train in `seconds`."""
    path = ROOT / "benchmarks" / "configs" / TEXTS[text].config
    precision = common_precision()
    runs = {}
    for name in costs:
        overrides = overrides_of(name, text, arguments.size)
        share = config_of(name, text, arguments.size).train.batch_size / BATCH_SIZE
        lengths = run_lengths(costs, name, seconds, share)
        budgets = arguments.budgets
        if name == DEFAULTS:
            budgets = ["time"]
        for budget in budgets:
            n_steps = lengths[budget]
            for seed in range(1, arguments.seeds + 1):
                label = f"{text}, {name}, equal {budget}, seed {seed}"
                folder = "-".join(
                    [arguments.size, text, name.replace(" ", "_"), precision, str(n_steps)]
                )
                own = [*overrides, f"run.seed={seed}", f"train.max_steps={n_steps}"]
                runs[name, budget, seed] = TrainingProcess(
                    label, path, own, arguments.folder / f"{folder}-{seed}"
                )
    by_seed = sorted(runs, key=lambda key: key[2])  # so that each comparison begins early
    return {key: runs[key] for key in by_seed}


def compare(
    text: str,
    costs: dict[str, Cost],
    runs: dict[tuple[str, str, int], TrainingProcess],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for each trick: its losses, and by how much they differ from those of the defaults.

    The interval is of 95%, from the differences by seed; 0 with one seed.
    """
    seeds = range(1, arguments.seeds + 1)
    default = [runs[DEFAULTS, "time", seed].loss for seed in seeds]
    rows = []
    print(f"{text}: time of a step; differences from {statistics.fmean(default):.4f}")
    for name in costs:
        row: dict[str, Any] = {"text": text, "trick": name}
        row["step_time"] = relative_time(costs, name)
        row["start_seconds"] = costs[name].start
        line = f"{name:<24} {row['step_time']:.3f}"
        for budget in BUDGETS:
            if (name, budget, 1) not in runs:
                continue
            own = [runs[name, budget, seed] for seed in seeds]
            losses = [run.loss for run in own]
            mean, interval = mean_and_interval([a - b for a, b in zip(losses, default)])
            row[budget] = {
                "losses": losses,
                "steps": own[0].final["step"],
                "tokens": own[0].final["tokens"],
                "difference": mean,
                "interval": interval,
            }
            line += f"  equal {budget} {mean:+.4f} ± {interval:.4f}"
        print(line)
        rows.append(row)
    return rows
