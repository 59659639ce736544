"""Find the learning rate and the batch size of a config by successive halving on short runs."""

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinker.checkpoint.run_directory import RunDirectory
from thinker.features.sweeps.comparison_report import print_event
from thinker.features.sweeps.halving import Cost, Rung, better_half, plan_rungs
from thinker.features.sweeps.tuning_report import (
    HEADER,
    best_result,
    best_so_far,
    format_rows,
    loss_of,
    plot,
    recommendation,
)
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write, make_folder
from thinker.runtime.process.progress import Progress
from thinker.runtime.reading import read_text
from thinker.training.config.config import Config, config_sections
from thinker.training.config.load import load_config
from thinker.training.config.sections import OptimizerConfig
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.initial_model import load_initial_model
from thinker.training.processes.child_process import train_side_by_side
from thinker.training.processes.training_process import Diverged, TrainingProcess
from thinker.training.settings.memory_bound import check_run_fits
from thinker.training.settings.memory_estimate import estimate_memory, free_memory, usable_fraction
from thinker.training.settings.resolve import resolve_open_keys, resolve_precision, resolve_settings
from thinker.training.settings.settings import Settings

RATES = ("lr", "embedding_lr", "head_lr", "norm_lr")
EVAL_SEQUENCES = 256  # the same for all trials, so that few suffice to compare them
MIN_STEPS = 20  # fewer say little about a learning rate
TIMED_STEPS = 6  # the first, which is slower, belongs to the start
PROCESS_BYTES = 500_000_000  # of a training process, beyond its tensors
# A trial has its own length, and is evaluated and saved only at its end.
NULL_KEYS = ["max_minutes", "eval_every", "save_every", "sample_every", "patience", "keep_every"]


@dataclass(frozen=True)
class Candidate:
    """Learning rates and a batch size; `overrides` are the keys in which they differ from the
    config."""

    multiplier: float
    batch_size: int
    overrides: tuple[str, ...]


@dataclass
class Trial(TrainingProcess):
    """The run of a candidate in a rung (from 1). A diverged run counts as infinite loss."""

    candidate: Candidate = field(kw_only=True)
    rung: int = field(kw_only=True)
    n_sequences: int = field(kw_only=True)

    def train(self, threads: int | None = None) -> None:
        """Run train.py to its end. Raises UserError unless it succeeds or diverges."""
        try:
            super().train(threads)
        except Diverged:
            self.curve = [{"val_loss": math.inf, "elapsed_s": math.nan}]


class Search:
    """A search in a folder: the runs of its trials, and tuning.jsonl with the plan and their
    results.

    A search with the same arguments in the same folder keeps the plan and the results. Raises
    UserError for other arguments.
    """

    def __init__(
        self, path: Path, overrides: list[str], folder: Path, as_json: bool = False
    ) -> None:
        self.as_json = as_json  # print results as lines of JSON
        self.path, self.overrides, self.folder = path, overrides, folder
        self.config = load_config(path, overrides)
        self.device = choose_device(self.config.train.device)
        self.precision = resolve_precision(self.config, self.device)
        self.rungs: list[Rung] = []
        self.rows: list[dict[str, Any]] = []  # results of trials
        self.size: list[str] = []  # keys that were open, as overrides

    def open(self, question: dict[str, Any]) -> None:
        """Read earlier results. `question`: all that the results depend on, besides the data."""
        self.question = question | {
            "config": self.config.model_dump(
                mode="json", exclude={"tracking": True, "run": {"dir"}}
            )
        }
        make_folder(self.folder, "--folder")
        self.results = self.folder / "tuning.jsonl"
        if not self.results.exists():
            return
        try:
            first, *self.rows = (json.loads(line) for line in read_text(self.results).splitlines())
            self.rungs = [Rung(**rung) for rung in first.pop("rungs")]
            self.precision, self.size = first.pop("precision"), first.pop("size")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.results} is damaged; remove it, or give another --folder"
            ) from error
        if first != self.question:
            raise UserError(
                f"{self.folder} contains a search with other arguments; give another --folder or "
                "remove it"
            )

    def save(self) -> None:
        """Write the plan and the results so far."""
        rungs = [vars(rung) for rung in self.rungs]
        first = self.question | {"precision": self.precision, "size": self.size, "rungs": rungs}
        atomic_write(self.results, "".join(json.dumps(line) + "\n" for line in (first, *self.rows)))

    def settings(self, batch_size: int) -> Settings:
        """The settings of a trial with this batch size."""
        changes = {
            "batch_size": batch_size,
            "compile": self.config.train.compile is True,
            "precision": self.precision,
        }
        micro_batch_size = self.config.train.micro_batch_size
        if isinstance(micro_batch_size, int):
            changes["micro_batch_size"] = math.gcd(micro_batch_size, batch_size)
        train = self.config.train.model_copy(update=changes)
        config = self.complete_config.model_copy(update={"train": train})
        check_run_fits(config, self.device)
        return resolve_settings(config, self.model_config, self.device, self.precision)

    def prepare(self) -> None:
        """Read the initial model and the data, which also puts the tokens into the cache for all
        trials."""
        if not self.size:
            resolved = resolve_open_keys(self.config, self.device, self.precision)
            self.size = changed_overrides(self.config, resolved)
        self.config = load_config(self.path, [*self.overrides, *self.size])
        self.complete_config, _, tokenizer = load_initial_model(self.config)
        tokenizer = prepare_training_data(self.complete_config, tokenizer).tokenizer
        self.model_config = self.complete_config.thinker_config(tokenizer.vocab_size)

    def candidate(
        self, multiplier: float, batch_size: int, optimizer: OptimizerConfig
    ) -> Candidate:
        """The rates of `optimizer`, resolved for this batch size, times the multiplier."""
        config, overrides = self.config.train, []
        if multiplier != 1:
            rates = {name: getattr(optimizer, name) for name in RATES}
            overrides += [
                f"optimizer.{name}={multiplier * lr:.6g}"
                for name, lr in rates.items()
                if lr is not None
            ]
        if batch_size != config.batch_size:
            overrides.append(f"train.batch_size={batch_size}")
            if isinstance(config.micro_batch_size, int) and batch_size % config.micro_batch_size:
                overrides.append(
                    f"train.micro_batch_size={math.gcd(config.micro_batch_size, batch_size)}"
                )
        return Candidate(multiplier, batch_size, tuple(overrides))

    def trial(self, candidate: Candidate, rung: int, n_sequences: int) -> Trial:
        """The run of a candidate on `n_sequences` sequences."""
        name = f"rung-{rung}-lr-x{candidate.multiplier:g}-batch-{candidate.batch_size}"
        train, eval_sequences = (
            self.config.train,
            self.config.train.eval_sequences or EVAL_SEQUENCES,
        )
        overrides = [
            *self.overrides,
            *self.size,
            *candidate.overrides,
            *(f"train.{key}=null" for key in NULL_KEYS),
        ]
        overrides += [
            f"train.max_steps={n_sequences // candidate.batch_size}",
            f"train.precision={self.precision}",
        ]
        overrides += [
            f"train.compile={'true' if train.compile is True else 'false'}"
        ]  # auto: a trial is short
        overrides += [
            f"train.eval_sequences={min(eval_sequences, EVAL_SEQUENCES)}",
            "tracking.trackers=null",
            "tracking.wandb=disabled",
        ]
        folder, values = (
            self.folder / name,
            {"candidate": candidate, "rung": rung, "n_sequences": n_sequences},
        )
        return Trial(name, self.path, overrides, folder, **values)

    def default_jobs(self, batch_size: int) -> int:
        """How many trials run at a time: on a CPU as many as there are cores, if their memory
        suffices."""
        if self.device.type != "cpu":
            return 1
        settings = self.settings(batch_size)
        peak = (
            PROCESS_BYTES
            + estimate_memory(settings, settings.train.micro_batch_size, self.device).peak
        )
        fitting = int(usable_fraction(self.device) * free_memory(self.device) / peak)
        return max(1, min(os.cpu_count() or 1, fitting))

    def measure_cost(self, candidates: list[Candidate], jobs: int) -> Cost:
        """Train `jobs` candidates side by side, as later, for a few steps. Raises UserError if
        their loss diverges.

        Steps of training.plan.time_steps, in one process alone, would be faster than beside others.
        """
        print("timing a few steps, and the start and end of a run", file=sys.stderr)
        trials = [
            self.trial(candidate, 0, TIMED_STEPS * candidate.batch_size)
            for candidate in candidates[:jobs]
        ]
        for trial in trials:
            trial.overrides.append("train.log_every=1")
            shutil.rmtree(trial.folder, ignore_errors=True)  # of an interrupted search
        start, elapsed, sequence_s = time.perf_counter(), [], []
        self.train(trials, jobs, lambda trial: None)
        seconds = time.perf_counter() - start
        for trial in trials:
            times = [
                line["elapsed_s"]
                for line in RunDirectory(trial.folder).read_metrics()
                if "train_loss" in line
            ]
            if len(times) < TIMED_STEPS:
                raise UserError(
                    f"{trial.name}: the loss is not finite; lower optimizer.lr, or set smaller "
                    "--multipliers"
                )
            elapsed.append(times[-1])
            sequence_s.append(
                (times[-1] - times[0]) / (TIMED_STEPS - 1) / trial.candidate.batch_size
            )
            shutil.rmtree(trial.folder)
        return Cost(seconds - min(elapsed), max(sequence_s), jobs)

    def train(self, trials: list[Trial], jobs: int, on_end: Any) -> None:
        """Train `jobs` trials at a time, on a CPU with one thread each."""
        n_threads = 1 if self.device.type == "cpu" else None
        train_side_by_side(trials, jobs, n_threads, on_end)

    def run(self, candidates: list[Candidate], jobs: int) -> None:
        """Train all rungs and print their results. Raises UserError if no trial has a finite
        loss."""
        self.seq_len = self.complete_config.data.seq_len
        total = sum(rung.n_trials * rung.n_sequences for rung in self.rungs) * self.seq_len
        if not self.as_json:
            print(HEADER, flush=True)
        with Progress(total=total, desc="tuning", unit=" tokens", unit_scale=True) as self.bar:
            for number, rung in enumerate(self.rungs, start=1):
                trials = {
                    (c.multiplier, c.batch_size): self.trial(c, number, rung.n_sequences)
                    for c in candidates
                }
                done = {(row["multiplier"], row["batch_size"]) for row in self.rung_rows(number)}
                self.bar.update(len(done) * rung.n_sequences * self.seq_len)
                self.train(
                    [trial for key, trial in trials.items() if key not in done], jobs, self.record
                )
                rows = {
                    (row["multiplier"], row["batch_size"]): row for row in self.rung_rows(number)
                }
                if not self.as_json:
                    self.bar.write(format_rows(list(rows.values())))
                losses = [loss_of(rows[key]) for key in trials]
                candidates = [candidates[index] for index in better_half(losses)]
                if len(candidates) <= 1:
                    break
        if best_result(self.rows) is None:
            raise UserError(
                "no run had a finite loss; lower optimizer.lr, or set smaller --multipliers"
            )

    def record(self, trial: Trial) -> None:
        """Save the result of a trial, and remove its weights, as a search may have dozens of
        runs."""
        candidate = trial.candidate
        row: dict[str, Any] = {
            "rung": trial.rung,
            "multiplier": candidate.multiplier,
            "batch_size": candidate.batch_size,
            "steps": trial.n_sequences // candidate.batch_size,
            "tokens": trial.n_sequences * self.seq_len,
            "val_loss": None,
            "seconds": None,
            "run": trial.name,
            "overrides": candidate.overrides,
        }
        if math.isfinite(trial.loss):
            row["val_loss"] = trial.loss
            row["seconds"] = trial.final["elapsed_s"]
        self.rows.append(row)
        if self.as_json:
            print_event("run", **row)
        self.save()
        shutil.rmtree(trial.folder / "checkpoints")
        self.bar.update(trial.n_sequences * self.seq_len)

    def rung_rows(self, number: int) -> list[dict[str, Any]]:
        """The results of a rung (from 1) so far."""
        return [row for row in self.rows if row["rung"] == number]


def tune(arguments: argparse.Namespace) -> None:
    """Run the search, print its table and its result, and plot it. Raises UserError for arguments
    that cannot work."""
    started = time.perf_counter()
    path = Path(arguments.config)
    folder = arguments.folder or Path("runs") / f"{path.stem}-tuning"
    search = Search(path, arguments.overrides, folder, arguments.json)
    multipliers = parse_numbers("--multipliers", arguments.multipliers, float)
    batch_sizes = (
        parse_numbers("--batch-sizes", arguments.batch_sizes, int) if arguments.batch_sizes else []
    )
    if len(multipliers) == len(batch_sizes) == 1:
        raise UserError(
            "one multiplier and one batch size leave nothing to compare; set more --multipliers"
        )
    if not 0 < arguments.minutes < math.inf:
        raise UserError(f"--minutes is {arguments.minutes:g}; it must be a positive number")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs is {arguments.jobs}; it must be at least 1")
    search.open(
        {"minutes": arguments.minutes, "multipliers": multipliers, "batch_sizes": batch_sizes}
    )
    search.prepare()
    train, candidates = search.config.train, []
    if not batch_sizes:
        halves = (
            [train.batch_size // 2] if train.batch_size % 2 == 0 else []
        )  # half of an odd number is none
        batch_sizes = [*halves, train.batch_size, 2 * train.batch_size]
    n_trials = len(multipliers) * len(batch_sizes)
    for size in batch_sizes:
        optimizer = search.settings(size).optimizer
        candidates += [search.candidate(multiplier, size, optimizer) for multiplier in multipliers]
    jobs = arguments.jobs or search.default_jobs(max(batch_sizes))
    try:
        if not search.rungs:
            cost = search.measure_cost(candidates, jobs)
            length = math.inf if train.max_steps is None else train.max_steps * train.batch_size
            min_steps, seconds = max(MIN_STEPS, 2 * train.warmup_steps), 60 * arguments.minutes
            seconds -= time.perf_counter() - started
            search.rungs = plan_rungs(n_trials, batch_sizes, min_steps, cost, seconds, length)
            search.save()
            sizes = ", ".join(str(rung.n_trials) for rung in search.rungs)
            estimate = f"about {cost.seconds(search.rungs) / 60:.1f} minutes"
            print(
                f"training {sizes} runs in successive rungs, {jobs} at a time, in {estimate}",
                file=sys.stderr,
            )
        search.run(candidates, jobs)
    except (KeyboardInterrupt, SystemExit):
        if search.as_json:
            print_event("stopped", verdict=best_so_far(search.rows), best=best_result(search.rows))
        else:
            print(best_so_far(search.rows), flush=True)
        raise
    lines = recommendation(search.rows, path, arguments.overrides, search.config)
    picture = arguments.png or search.folder / "tuning.png"
    plot(search.rows, picture)
    if search.as_json:
        best = best_result(search.rows)
        files = {"png": str(picture), "results": str(search.results)}
        print_event("done", verdict=lines[0], notes=lines[1:], best=best, files=files)
    else:
        print("\n".join(lines))


def parse_numbers(flag: str, text: str, kind: type) -> list[Any]:
    """The positive numbers in "1,2", in order. Raises UserError for anything else, and for one that
    is repeated."""
    try:
        numbers = sorted(kind(number) for number in text.split(","))
    except ValueError as error:
        wanted = {int: "whole numbers such as 8,16", float: "numbers such as 0.5,1,2"}[kind]
        raise UserError(f"{flag} is {text!r}; it must be {wanted}") from error
    if not 0 < numbers[0] <= numbers[-1] < math.inf or len(set(numbers)) < len(numbers):
        raise UserError(f"{flag} is {text!r}; the numbers must be positive and different")
    return numbers


def changed_overrides(before: Config, after: Config) -> list[str]:
    """The keys that resolve_open_keys() has changed, as overrides section.key=value."""
    old = before.model_dump(mode="json")
    new = after.model_dump(mode="json")
    overrides = []
    for section in config_sections():
        for key, value in new[section].items():
            if value != old[section][key]:
                overrides.append(f"{section}.{key}={json.dumps(value)}")
    return overrides
