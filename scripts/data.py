"""Show the training data of a config: python scripts/data.py CONFIG [section.key=value ...]."""

from thinker.commands.data_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
