"""Seconds from the start of generate.py to its first token, compared with importing torch."""

import argparse
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinker.benchmarks.environment import time_alternately

GENERATE = Path(__file__).parents[2] / "generate.py"
OPTIONS = (
    "",
    "--bits 8",
    "--bits 4",
    "--precision bf16",
    "--compile",
    "--no-compile",
    "--window 64",
    "--speculate 4",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--run", default="runs/quickstart", help="run directory, checkpoint or Hugging Face folder"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timing rounds; medians are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a process per option and round, after a first round that compiles the kernels, and print
    a table."""
    commands = [[sys.executable, "-c", "import torch"]]
    one_token = ["--prompt", "Once upon a time", "--max-new-tokens", "1", "--seed", "1"]
    commands += [
        [sys.executable, str(GENERATE), arguments.run, *one_token, *option.split()]
        for option in OPTIONS
    ]
    options = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    calls = [partial(subprocess.run, command, **options) for command in commands]
    seconds = [
        statistics.median(each)
        for each in time_alternately(calls, arguments.repeats, torch.device("cpu"))
    ]
    rows = [
        {"options": name, "seconds": each, "of_import": each / seconds[0]}
        for name, each in zip(("import torch", *OPTIONS), seconds)
    ]
    for row in rows:
        print(
            f"{row['options'] or 'no options':18} {row['seconds']:6.2f} s  {row['of_import']:5.2f}"
        )
    return {"run": Path(arguments.run).name, "rows": rows}
