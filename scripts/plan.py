"""What a config will take, before it starts: python scripts/plan.py CONFIG.yaml [section.key=value ...]."""

import json

from thinker.runtime.errors import run_command
from thinker.training.command_line import ConfigArgumentParser


def main() -> int:
    """Print the plan. Returns the exit status."""
    parser = ConfigArgumentParser(description="What a training will take: memory, FLOPs, tokens and time.")
    parser.add_argument("--no-steps", action="store_true", help="predict only: make no steps, measure no time")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    arguments = parser.parse_command_line()
    from thinker.training.advice import format_plan
    from thinker.training.config import load_config
    from thinker.training.plan import make_plan

    plan = make_plan(load_config(arguments.config, arguments.overrides), measure=not arguments.no_steps)
    print(json.dumps(plan) if arguments.json else format_plan(plan))
    return 0


if __name__ == "__main__":
    run_command(main)
