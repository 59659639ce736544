"""How well `thinker ladder` predicts the loss of a model from smaller copies of it."""

from __future__ import annotations

import argparse
from typing import Any

from thinker.features.ladder.ladder_command import add_flags, run_ladder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `thinker ladder`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the model to predict")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of the config"
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict, print and plot as the command does."""
    return run_ladder(arguments)
