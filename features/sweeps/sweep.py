"""The runs of a sweep in a folder: train them, and continue where they were stopped.

FOLDER/
  sweep.json   of each run: the config, the text, and its end
  NAME/        the run directories
  runs.csv  settings.csv  sweep.png  the results
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from thinker.checkpoint.run_directory import RunDirectory
from thinker.data.text.document import MissingData
from thinker.data.text.sources import open_source, stamps
from thinker.features.sweeps.comparison import Comparison, Group, differing_keys
from thinker.features.sweeps.grid import Setting
from thinker.features.sweeps.run_result import WITHOUT_EFFECT, RunResult, flatten, read_run
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write, make_folder
from thinker.runtime.reading import read_json
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.processes.child_process import train_side_by_side
from thinker.training.processes.training_process import Diverged, TrainingProcess

PLAN = "sweep.json"
TAIL_BYTES = 4096  # of metrics.jsonl, with its last line


@dataclass
class SweepRun(TrainingProcess):
    """The run of a setting with a seed. `status`: "" before its end, then finished, not finite,
    failed or stopped."""

    setting: Setting = field(kw_only=True)
    seed: int = field(kw_only=True)
    status: str = ""
    error: str | None = None

    def __post_init__(self) -> None:
        """Find mistakes in the config before any run starts. Raises UserError."""
        self.config_read = load_config(self.config, self.overrides)

    def train(self, threads: int | None = None) -> None:
        """Train to the end. A failure becomes the status, so that other runs go on."""
        try:
            super().train(threads)
            self.status = "finished"
        except Diverged:
            self.status = "not finite"
        except UserError as error:
            self.status = "failed"
            self.error = str(error).removeprefix(f"{self.name}: ")
        if self.process.is_stopped and self.status == "failed":
            self.status = "stopped"

    def identity(self) -> dict[str, Any]:
        """The keys of the config that the result depends on."""
        keys = flatten(self.config_read.model_dump(mode="json", exclude={"tracking"}))
        return {key: value for key, value in keys.items() if key not in WITHOUT_EFFECT}

    def result(self) -> RunResult:
        """What its folder says, with the status of this sweep."""
        try:
            result = read_run(self.folder)
        except UserError:  # it has written nothing
            result = RunResult(self.folder, "unfinished", {"run.seed": self.seed}, [])
        if self.status in ("not finite", "failed"):
            result.status = self.status
            result.error = self.error
        return result

    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1, by its last line of metrics."""
        if self.status in ("finished", "not finite", "failed"):
            return 1.0
        line = last_line(RunDirectory(self.folder).metrics)
        train = self.config_read.train
        shares = [0.0]
        if train.max_steps:
            shares.append(line.get("step", 0) / train.max_steps)
        if train.max_minutes:
            shares.append(line.get("elapsed_s", 0) / 60 / train.max_minutes)
        return min(1.0, max(shares))


class Sweep:
    """The runs of all settings and seeds. The seeds are the config's and those that follow it.

    minutes: the training time of each run; None: as the config says.
    Raises UserError for a config that cannot be trained.
    """

    def __init__(
        self,
        config: Path,
        overrides: list[str],
        settings: list[Setting],
        seeds: int,
        minutes: float | None,
        folder: Path,
    ) -> None:
        self.folder = folder
        self.settings = settings
        base = load_config(config, overrides)
        limit = [] if minutes is None else [f"train.max_minutes={minutes:g}"]
        self.runs: list[SweepRun] = []
        # Seed by seed, so that a sweep that is stopped has compared the settings.
        for seed in range(base.run.seed, base.run.seed + seeds):
            for setting in settings:
                name = f"{setting.folder_name}-seed-{seed}"
                options = [*overrides, *limit, *setting.overrides, f"run.seed={seed}"]
                run = SweepRun(name, config, options, folder / name, setting=setting, seed=seed)
                self.runs.append(run)
        self._lock = FileLock(folder / ".lock", timeout=0)
        self._entries: dict[str, dict[str, Any]] = {}  # sweep.json, by the name of a run

    def open(self) -> None:
        """Lock the folder, and find the runs that have ended.

        Raises UserError if another sweep is at work there, and if a run was trained with another
        config.
        """
        make_folder(self.folder, "--folder")
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another sweep is at work in {self.folder}; wait for it, or give another --folder"
            ) from error
        path = self.folder / PLAN
        if path.exists():
            self._entries = read_json(path)
        for run in self.runs:
            entry = self._entries.get(run.name)
            config = json.loads(json.dumps(run.identity()))
            text = text_key(run.config_read)
            if entry is not None:
                self._check_config(run, entry, config)
                # train.py notices a changed text; of a run that has ended, only this does.
                is_same_text = text is None or entry["text"] == text
                if is_same_text and run.folder.is_dir():
                    run.status = entry["status"]
            self._entries[run.name] = {"config": config, "text": text, "status": run.status}
        self._save()

    def _check_config(self, run: SweepRun, entry: dict[str, Any], config: dict[str, Any]) -> None:
        """Raise UserError if the run was planned with another config."""
        changed = differing_keys([entry["config"], config])
        if not changed:
            return
        key = changed[0]
        before, now = entry["config"].get(key), config.get(key)
        raise UserError(
            f"{run.folder} was trained with {key}={before}, which is now {now}; give another "
            f"--folder, undo the change, or remove {self.folder}"
        )

    def _save(self) -> None:
        atomic_write(self.folder / PLAN, json.dumps(self._entries, indent=1) + "\n")

    @property
    def unfinished(self) -> list[SweepRun]:
        """The runs that have not ended, in the order in which they are trained."""
        return [run for run in self.runs if run.status not in ("finished", "not finite")]

    @property
    def progress(self) -> float:
        """The number of runs that are done, with the parts of those at work."""
        return sum(run.progress() for run in self.runs)

    def train(
        self, jobs: int, on_end: Callable[[SweepRun], None], on_wait: Callable[[], None]
    ) -> None:
        """Train the runs that have not ended, `jobs` at a time, which share the cores."""
        threads = None
        if jobs > 1:
            threads = max(1, (os.cpu_count() or 1) // jobs)

        def record(run: SweepRun) -> None:
            if run.status in ("finished", "not finite"):
                self._entries[run.name]["status"] = run.status
                self._save()
            if run.status != "stopped":
                on_end(run)

        train_side_by_side(self.unfinished, jobs, threads, record, on_wait)

    def compare(self, baseline: Setting | None = None) -> Comparison:
        """The settings, best first. baseline: the one that the others' distance is measured
        from."""
        groups = {}
        for setting in self.settings:
            runs = [run for run in self.runs if run.setting is setting]
            results = [run.result() for run in runs]
            groups[setting.name] = Group(setting.name, results, dict(setting.values))
        base = None if baseline is None else groups[baseline.name]
        return Comparison(list(groups.values()), base)

    def close(self) -> None:
        """Let other sweeps use the folder."""
        self._lock.release()


def text_key(config: Config) -> list[Any] | None:
    """What changes with the text of a config, such as the sizes and times of its files; None if it
    is missing, as train.py can use cached tokens."""
    data = config.data
    try:
        keys: list[Any] = []
        for source in data.text_sources():
            keys.append(open_source(seed=config.run.seed, **source.source_options()).key)
        if data.val_tokens is not None:
            keys.append([list(stamp) for stamp in stamps([data.val_tokens])])
    except (MissingData, FileNotFoundError):
        return None
    return keys


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of metrics.jsonl; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):  # it has not begun
        return {}
    for line in reversed(lines):
        if line.endswith(b"\n"):
            try:
                found = json.loads(line)
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}
