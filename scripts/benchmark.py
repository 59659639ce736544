"""Measure beside peers: python scripts/benchmark.py decode."""

from __future__ import annotations

import argparse

from thinker.runtime.errors import run_command


def main() -> int:
    """Choose a benchmark and run it. Returns the exit status."""
    from thinker.benchmarks import (
        ablation,
        attention,
        checkpoint_overhead,
        comm_volume,
        decode,
        extrapolation,
        html_report,
        linear_cross_entropy,
        speculative,
        sweep,
        train,
    )

    parser = argparse.ArgumentParser(description="Measures beside peers in one run; ends with one line of JSON.")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (
        ablation,
        attention,
        checkpoint_overhead,
        comm_volume,
        decode,
        extrapolation,
        html_report,
        linear_cross_entropy,
        speculative,
        sweep,
        train,
    ):
        name = module.__name__.split(".")[-1]
        command = commands.add_parser(name, help=(module.__doc__ or "").strip().split("\n")[0])
        command.set_defaults(run_benchmark=module.run)
        module.add_arguments(command)
    arguments = parser.parse_args()
    arguments.run_benchmark(arguments)
    return 0


if __name__ == "__main__":
    run_command(main)
