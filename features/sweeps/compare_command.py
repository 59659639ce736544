"""The command `thinker compare`: runs beside each other, grouped by seed."""

import argparse
from pathlib import Path

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file
from thinker.runtime.plot_style import png_file

EXAMPLES = ("runs/a runs/b", "runs/* --png compare.png --csv compare.csv")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    description = (
        "Compare runs: their losses, sizes and times, and the keys in which they differ. Runs that "
        "differ only in run.seed are one setting, with its mean, interval and Welch's t-test."
    )
    parser = ArgumentParser(description=description, examples=EXAMPLES)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories, or folders of sweeps"
    )
    parser.add_argument(
        "--png", type=png_file, metavar="FILE", help="plot the losses over tokens and at the end"
    )
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write a table with a row for each run"
    )
    parser.add_argument(
        "--json", action="store_true", help="print lines of JSON instead of the table"
    )
    return parser


def main() -> int:
    """Compare and print. Returns the exit status."""
    arguments = make_parser().parse_args()

    from thinker.features.sweeps import comparison_report
    from thinker.features.sweeps.comparison import Comparison, group_runs
    from thinker.features.sweeps.run_result import read_run

    folders = run_folders(arguments.runs)
    runs, damaged = [], []
    for folder in dict.fromkeys(folders):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            # In runs/*, one damaged run does not keep the others from being compared.
            if len(folders) == 1 or not (folder / "config.yaml").is_file():
                raise
            damaged.append(f"{error}; the run is left out")
    without = [run for run in runs if not run.curve]
    runs = [run for run in runs if run.curve]
    if not runs:
        raise UserError("none of these runs has a validation loss; train them for longer")
    groups, notes = group_runs(runs)
    comparison = Comparison(groups)
    notes += comparison.notes + damaged
    for run in without:
        notes.append(f"{run.folder} has no validation loss and is left out")
    if arguments.csv is not None:
        comparison_report.write_runs_csv(comparison, arguments.csv)
    if arguments.png is not None:
        comparison_report.plot(comparison, arguments.png)
    verdict = comparison.verdict()
    if arguments.json:
        for group in comparison.groups:
            for run in group.runs:
                comparison_report.print_event("run", setting=group.name, **run.as_row())
        for row in comparison.rows():
            comparison_report.print_event("setting", **row)
        comparison_report.print_event("done", verdict=verdict, notes=notes)
        return 0
    print(comparison_report.format_table(comparison))
    differences = comparison_report.format_differences(comparison)
    for text in (differences, verdict, *notes):
        if text:
            print(f"\n{text}")
    return 0


def run_folders(given: list[Path]) -> list[Path]:
    """The run directories that are meant. The folder of a sweep stands for its runs. Of several
    folders, as in runs/*, others are skipped; a single one must be a run or a sweep."""
    folders = []
    for folder in given:
        if (folder / "sweep.json").is_file():
            folders += sorted(path.parent for path in folder.glob("*/config.yaml"))
        elif len(given) == 1 or not folder.exists() or (folder / "config.yaml").is_file():
            folders.append(folder)
    return folders
