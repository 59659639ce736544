"""Train a model: python train.py CONFIG [section.key=value ...]."""

import sys

try:
    from thinker.training.command import command
except ModuleNotFoundError:  # thinker itself: for packages of others, see run_command()
    print(
        "error: run `make demo` and use .venv/bin/python, or pip install -r requirements.txt",
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    command()
