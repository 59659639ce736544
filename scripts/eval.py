"""Evaluate a model: python scripts/eval.py PATH."""

from thinker.commands.eval_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
