"""Fit how the loss falls with compute: python scripts/scaling.py CONFIG.yaml [section.key=value ...]."""

from __future__ import annotations

import argparse
from pathlib import Path

from thinker.runtime.errors import run_command


def main() -> int:
    """Train models of several sizes, fit a power law to their losses and plot it. Returns the exit status."""
    from thinker.benchmarks import scaling
    from thinker.benchmarks.environment import record_result

    parser = argparse.ArgumentParser(description="Trains models of several sizes and fits their loss against compute.")
    scaling.add_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the line of JSON to this file")
    arguments = parser.parse_args()
    record_result("scaling", scaling.run(arguments), arguments.out)
    return 0


if __name__ == "__main__":
    run_command(main)
