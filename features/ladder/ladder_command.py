"""The command `thinker ladder`: predict the loss of a model from smaller copies of it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import png_file
from thinker.training.config.command_line import ConfigArgumentParser

if TYPE_CHECKING:
    from thinker.features.ladder.ladder_plan import LadderPlan

EXAMPLES = (
    "pysource --tokens-per-parameter 10 --plan",
    "pysource model.d_model=512 model.n_layers=8 model.n_heads=8 --minutes 60 --jobs 2",
    "chars data.path=my.txt --check",
)


def make_parser() -> ConfigArgumentParser:
    """The command line."""
    description = (
        "Train smaller copies of a model, each with as many tokens per parameter, and predict the "
        "model's loss from theirs. The same command again continues."
    )
    parser = ConfigArgumentParser(description=description, examples=EXAMPLES)
    add_flags(parser)
    parser.add_argument(
        "--json", action="store_true", help="print lines of JSON instead of the table"
    )
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the command and its benchmark share."""
    group = parser.add_argument_group("sizes")
    group.add_argument(
        "--tokens-per-parameter",
        type=float,
        metavar="R",
        help="training tokens of all sizes for each parameter (default: those of train.max_steps; "
        "without it 20)",
    )
    group.add_argument(
        "--sizes", type=int, default=6, metavar="N", help="number of smaller copies (default: 6)"
    )
    group.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs of each copy, with run.seed and the seeds that follow it (default: 1)",
    )
    budget = group.add_mutually_exclusive_group()
    budget.add_argument(
        "--gap",
        type=float,
        default=None,
        metavar="X",
        help="how many times the FLOPs of the largest copy the model has (default: 8)",
    )
    budget.add_argument(
        "--flops", type=float, metavar="F", help="FLOPs of all copies together, instead of --gap"
    )
    budget.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="training time of all copies together, instead of --gap",
    )
    group = parser.add_argument_group("runs")
    group.add_argument("--plan", action="store_true", help="say what would be trained, and stop")
    group.add_argument(
        "--check", action="store_true", help="then train the model itself, to check the prediction"
    )
    group.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, which share the cores (default: 1)"
    )
    group.add_argument(
        "--folder",
        type=Path,
        help="folder for runs; finished runs are reused (default: runs/NAME-ladder)",
    )
    parser.add_argument(
        "--png",
        type=png_file,
        metavar="FILE",
        help="plot to write (default: ladder.png in --folder)",
    )


def main() -> int:
    """Train and predict. Returns the exit status."""
    arguments = make_parser().parse_command_line()
    run_ladder(arguments, arguments.json)
    return 0


def run_ladder(arguments: argparse.Namespace, as_json: bool = False) -> dict[str, Any]:
    """Plan, train, predict, print and plot. Returns the result as LadderResult.as_json() has it;
    with --plan, the sizes."""
    check_flags(arguments)

    from thinker.features.ladder.ladder_report import LadderReport
    from thinker.features.ladder.ladder_result import LadderResult

    folder = arguments.folder
    if folder is None:
        folder = Path("runs") / f"{Path(arguments.config).stem}-ladder"
    plan = choose_plan(arguments, folder)
    report = LadderReport(plan, folder, as_json)
    sweep = plan.sweep(plan.rungs[::-1], arguments.seeds, folder)  # the largest first
    if arguments.plan:
        report.describe(sweep)
        return {"sizes": [rung.as_row() for rung in [*plan.rungs, plan.target]]}
    report.train(sweep, arguments.jobs)
    result = LadderResult(plan, sweep)
    report.predict(result)
    if arguments.check:
        check = plan.sweep([plan.target], 1, folder)
        report.train(check, arguments.jobs)
        result.add_check(check.runs[0])
        report.check(result)
    report.end(result, arguments.png or folder / "ladder.png")
    return result.as_json()


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise UserError for a flag that cannot work."""
    for name in ("sizes", "seeds", "jobs"):
        value = getattr(arguments, name)
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    for name in ("tokens_per_parameter", "gap", "flops", "minutes"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {value:g}; it must be a positive number")
    from thinker.features.ladder.ladder_plan import MIN_GAP
    from thinker.features.ladder.power_law import MIN_SIZES

    if arguments.sizes < MIN_SIZES:
        raise UserError(f"--sizes is {arguments.sizes}; a power law needs at least {MIN_SIZES}")
    if arguments.gap is not None and arguments.gap < MIN_GAP:
        raise UserError(f"--gap is {arguments.gap:g}; it must be at least {MIN_GAP:g}")
    if arguments.plan and arguments.check:
        raise UserError("--plan trains nothing, so --check has no effect; remove one of them")


def choose_plan(arguments: argparse.Namespace, folder: Path) -> LadderPlan:
    """The plan for the budget of the command line."""
    from thinker.features.ladder.ladder_plan import GAP, gap_of_budget, make_ladder_plan

    def plan_with(gap: float) -> LadderPlan:
        config, ratio = Path(arguments.config), arguments.tokens_per_parameter
        return make_ladder_plan(config, arguments.overrides, arguments.sizes, ratio, gap)

    if arguments.flops is None and arguments.minutes is None:
        return plan_with(arguments.gap or GAP)
    plan = plan_with(GAP)
    flops = arguments.flops
    if flops is None:
        flops = flops_of_minutes(plan, arguments, folder)
    return plan_with(gap_of_budget(plan.target, arguments.seeds, arguments.sizes, flops))


def flops_of_minutes(plan: LadderPlan, arguments: argparse.Namespace, folder: Path) -> float:
    """The FLOPs that the copies of a plan would compute in --minutes on this machine.

    They are written into the folder, so that the same command finds its runs again. Those of
    another model or time are measured again.
    """
    from thinker.runtime.files import atomic_write, make_folder
    from thinker.runtime.reading import read_json

    path = folder / "budget.json"
    asked = {"minutes": arguments.minutes, "target": plan.target.as_row()}
    if path.exists():
        budget = read_json(path)
        if asked.items() <= budget.items():
            return budget["flops"]
    print("timing a few steps of each size", file=sys.stderr)
    seconds = sum(plan.seconds(rung) for rung in plan.rungs)
    flops = sum(rung.flops for rung in plan.rungs) * 60 * arguments.minutes / seconds
    make_folder(folder, "--folder")
    atomic_write(path, json.dumps(asked | {"flops": flops}) + "\n")
    return flops
