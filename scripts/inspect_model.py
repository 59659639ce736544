"""Inspect a model: python scripts/inspect_model.py COMMAND MODEL [flags]."""

from thinker.commands.inspect_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
