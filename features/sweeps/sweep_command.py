"""The command `thinker sweep`: train a grid of settings with several seeds."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import png_file
from thinker.training.config.command_line import ConfigArgumentParser
from thinker.training.config.key_completion import complete_override

if TYPE_CHECKING:
    from thinker.features.sweeps.comparison import Comparison
    from thinker.features.sweeps.grid import Setting
    from thinker.features.sweeps.sweep import Sweep, SweepRun

EXAMPLES = (
    "small-text data.path=my.txt --grid optimizer.lr=x0.5,x1,x2 --seeds 3",
    "quickstart --grid optimizer.lr=0.01,0.02 --grid model.d_model=64,128 --jobs 2",
    "quickstart --variant 'narrow: model.d_model=64 model.n_layers=4' "
    "--variant 'wide: model.d_model=128 model.n_layers=2' --minutes 5 --seeds 3",
    "small-text data.path=my.txt --halving --minutes 10",
)
HALVING_MINUTES = 10.0
BAR = "{desc} {percentage:3.0f}%|{bar}| {n:.1f}/{total} [{elapsed}<{remaining}]{postfix}"


def make_parser() -> ConfigArgumentParser:
    """The command line."""
    description = (
        "Train a config with every combination of some values and with several seeds, and compare "
        "the results. The same command again continues."
    )
    parser = ConfigArgumentParser(description=description, examples=EXAMPLES)
    group = parser.add_argument_group("settings")
    grid = group.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="section.key=V1,V2,...",
        help="values of a key; x0.5 multiplies the config's; repeatable: every combination is "
        "trained",
    )
    grid.completer = complete_override
    group.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME: section.key=value ...",
        help="a named set of overrides; repeatable: the others are compared with the first",
    )
    group.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs of each setting, with run.seed and the seeds that follow it (default: 1)",
    )
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--minutes",
        type=float,
        help="training time of each run; with --halving, of the whole search (default: as in the "
        f"config; with --halving {HALVING_MINUTES:g})",
    )
    group.add_argument(
        "--jobs",
        type=int,
        help="runs at a time, which share the cores (default: 1; with --halving, one per core on a "
        "CPU, if memory suffices)",
    )
    group.add_argument(
        "--folder",
        type=Path,
        help="folder for runs; finished runs are reused (default: runs/NAME-sweep; with --halving, "
        "runs/NAME-tuning)",
    )
    group = parser.add_argument_group("successive halving")
    group.add_argument(
        "--halving",
        action="store_true",
        help="find the learning rates and the batch size on short runs, the better half of which "
        "is repeated for longer",
    )
    group.add_argument(
        "--multipliers",
        metavar="X,X,...",
        help="factors by which to multiply the config's learning rates (default: "
        "0.35,0.5,0.7,1,1.4,2)",
    )
    group.add_argument(
        "--batch-sizes",
        metavar="N,N,...",
        help="batch sizes to try (default: half the config's, the config's, and twice that)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--png",
        type=png_file,
        metavar="FILE",
        help="plot to write (default: sweep.png in --folder; with --halving, tuning.png)",
    )
    group.add_argument(
        "--json", action="store_true", help="print lines of JSON instead of the table"
    )
    return parser


def main() -> int:
    """Train and compare. Returns the exit status: 1 if a run failed."""
    parser = make_parser()
    arguments = parser.parse_command_line()
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise UserError(f"--minutes is {arguments.minutes:g}; it must be a positive number")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs is {arguments.jobs}; it must be at least 1")
    if arguments.halving:
        parser.check_unused(arguments, "with --halving", ("grid", "variant", "seeds"))
        from thinker.features.sweeps.tuning import tune

        if arguments.minutes is None:
            arguments.minutes = HALVING_MINUTES
        if arguments.multipliers is None:
            arguments.multipliers = "0.35,0.5,0.7,1,1.4,2"
        tune(arguments)
        return 0
    parser.check_unused(arguments, "without --halving", ("multipliers", "batch_sizes"))
    return sweep(arguments)


def sweep(arguments: argparse.Namespace) -> int:
    """Train all runs and report the results. Returns the exit status: 1 if a run failed."""
    if arguments.seeds < 1:
        raise UserError(f"--seeds is {arguments.seeds}; it must be at least 1")

    from thinker.features.sweeps.grid import make_settings, parse_grid, parse_variants
    from thinker.features.sweeps.sweep import Sweep

    config = Path(arguments.config)
    grid = parse_grid(arguments.grid)
    variants = parse_variants(arguments.variant)
    settings = make_settings(config, arguments.overrides, grid, variants)
    if len(settings) * arguments.seeds < 2:
        raise UserError("one run leaves nothing to compare; set --grid, --variant or --seeds")
    folder = arguments.folder
    if folder is None:
        folder = Path("runs") / f"{config.stem}-sweep"
    sweep = Sweep(config, arguments.overrides, settings, arguments.seeds, arguments.minutes, folder)
    sweep.open()
    baseline = None
    if len(variants) > 1 and not grid:
        baseline = settings[0]
    report = Report(sweep, arguments, baseline, numeric_key(grid))
    try:
        report.start()
        report.train()
    except (KeyboardInterrupt, SystemExit):
        report.end("stopped")
        raise
    finally:
        sweep.close()
    report.end("done")
    failed = [run for run in sweep.runs if run.status == "failed"]
    return 1 if failed else 0


def numeric_key(grid: dict[str, list[str]]) -> str | None:
    """The first key of the grid that has several numbers as values: the x axis of the plot."""
    from thinker.features.sweeps.grid import numbers_of

    for key, values in grid.items():
        if len(values) > 1 and numbers_of(values) is not None:
            return key
    return None


class Report:
    """What a sweep prints and writes: for people, or as lines of JSON for programs."""

    def __init__(
        self,
        sweep: Sweep,
        arguments: argparse.Namespace,
        baseline: Setting | None,
        x_key: str | None,
    ) -> None:
        self.sweep = sweep
        self.arguments = arguments
        self.baseline = baseline
        self.x_key = x_key

    def start(self) -> None:
        """Say what will be trained."""
        n_runs = len(self.sweep.runs)
        n_finished = n_runs - len(self.sweep.unfinished)
        if self.arguments.json:
            self._event("start", folder=str(self.sweep.folder), runs=n_runs, finished=n_finished)
            return
        n_settings = len(self.sweep.settings)
        text = f"{n_settings} settings × {self.arguments.seeds} seeds in {self.sweep.folder}"
        if n_finished:
            text += f"; {n_finished} of {n_runs} runs are finished"
        print(text, file=sys.stderr)

    def train(self) -> None:
        """Train the runs that have not ended, with a progress bar."""
        from thinker.runtime.process.progress import Progress

        total = len(self.sweep.runs)
        with Progress(total=total, desc="sweep", bar_format=BAR, smoothing=0) as bar:

            def on_wait() -> None:
                done = self.sweep.progress
                if done > bar.n:  # otherwise a log would get a line twice a second
                    bar.update(done - bar.n)

            def on_end(run: SweepRun) -> None:
                self._run_ended(run, bar)

            bar.update(self.sweep.progress)
            self.sweep.train(self.arguments.jobs or 1, on_end, on_wait)

    def _run_ended(self, run: SweepRun, bar: Any) -> None:
        result = run.result()
        if self.arguments.json:
            values = {"name": run.name, "setting": run.setting.name, "settings": run.setting.values}
            self._event("run", **values, **result.as_row())
            return
        if run.status == "finished":
            loss = result.final("val_loss")
            bar.set_postfix_str(f"{run.name}: {loss:.4f}")
        elif run.status == "not finite":
            bar.write(f"{run.name}: the loss is not finite", file=sys.stderr)
        else:
            bar.write(f"{run.name} failed: {run.error}", file=sys.stderr)

    def end(self, event: str) -> None:
        """Print and write the results: "done", or "stopped" by a signal."""
        from thinker.features.sweeps import comparison_report

        folder = self.sweep.folder
        comparison = self.sweep.compare(self.baseline)
        n_left = len([run for run in self.sweep.unfinished if run.status != "failed"])
        failed = [run for run in self.sweep.runs if run.status == "failed"]
        files = {"runs": folder / "runs.csv", "settings": folder / "settings.csv"}
        comparison_report.write_runs_csv(comparison, files["runs"])
        comparison_report.write_settings_csv(comparison, files["settings"])
        if event == "done":
            files["png"] = self.arguments.png or folder / "sweep.png"
            comparison_report.plot(comparison, files["png"], self.x_key)
        verdict = comparison.verdict()
        if event == "stopped":
            verdict = f"stopped with {n_left} runs left; the same command continues"
        if self.arguments.json:
            for row in comparison.rows():
                self._event("setting", **row)
            self._event(
                event,
                verdict=verdict,
                notes=comparison.notes,
                failed=[run.name for run in failed],
                left=n_left,
                train=self._best_command(comparison),
                files={name: str(path) for name, path in files.items()},
            )
            return
        print(comparison_report.format_table(comparison))
        lines = [verdict, *comparison.notes]
        if event == "done":
            lines.append(self._best_command(comparison))
        for run in failed:
            lines.append(f"{run.name} failed: {run.error}; the same command tries again")
        for line in lines:
            if line:
                print(f"\n{line}")
        sys.stdout.flush()

    def _best_command(self, comparison: Comparison) -> str:
        """The command that trains the best setting; "" if there is none."""
        if comparison.best is None:
            return ""
        settings = self.sweep.settings
        best = next(each for each in settings if each.name == comparison.best.name)
        arguments = [self.arguments.config, *self.arguments.overrides, *best.overrides]
        return shlex.join(["thinker", "train", *map(str, arguments)])

    def _event(self, event: str, **values: Any) -> None:
        from thinker.features.sweeps.comparison_report import print_event

        print_event(event, **values)
