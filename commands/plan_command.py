"""The command `thinker plan`: what a run needs."""

import json

from thinker.training.config.command_line import ConfigArgumentParser


def main() -> int:
    """Print the estimate. Returns the exit status."""
    examples = ("small-text data.path=my.txt", "gpu-124m --no-steps --json")
    description = "Estimate the memory, FLOPs, tokens and time of a run, and check whether it fits."
    parser = ConfigArgumentParser(description=description, examples=examples)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--no-steps",
        action="store_true",
        help="do not measure speed and memory (default: run 4 steps)",
    )
    group.add_argument(
        "--operations",
        action="store_true",
        help="also print the FLOPs and bytes of each operation (--json always has them)",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    arguments = parser.parse_command_line()
    from thinker.training.config.load import load_config
    from thinker.training.reports.plan import make_plan
    from thinker.training.reports.plan_operations import format_operations
    from thinker.training.reports.plan_table import format_plan

    plan = make_plan(
        load_config(arguments.config, arguments.overrides), measure=not arguments.no_steps
    )
    if arguments.json:
        print(json.dumps(plan))
        return 0
    print(format_plan(plan))
    if arguments.operations:
        print(f"\n{format_operations(plan['operations'])}")
    return 0
