"""Measure beside peers: python scripts/benchmark.py decode."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import run_command


def main() -> int:
    """Choose a benchmark and run it. Returns the exit status."""
    from benchmarks import ablation, attention, decode, extrapolation, head, page, saving, sweep, train, trained, wire

    parser = argparse.ArgumentParser(description="Measures beside peers in one run; ends with one line of JSON.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (ablation, attention, decode, extrapolation, head, page, saving, sweep, train, trained, wire):
        name = module.__name__.split(".")[-1]
        command = commands.add_parser(name, help=(module.__doc__ or "").strip().split("\n")[0])
        command.set_defaults(run_benchmark=module.run)
        module.add_arguments(command)
    arguments = parser.parse_args()
    arguments.run_benchmark(arguments)
    return 0


if __name__ == "__main__":
    run_command(main)
