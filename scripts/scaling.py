"""How loss falls with compute: python scripts/scaling.py RECIPE.yaml [section.key=value ...]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import run_command


def main() -> int:
    """Train the ladder, fit, draw. Returns the exit status."""
    from benchmarks import scaling

    parser = argparse.ArgumentParser(description="Trains a ladder of sizes and fits loss against compute.")
    scaling.add_arguments(parser)
    scaling.run(parser.parse_args())
    return 0


if __name__ == "__main__":
    run_command(main)
