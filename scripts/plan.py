"""Estimate what a run needs: python scripts/plan.py CONFIG [section.key=value ...]."""

from thinker.commands.plan_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
