"""How loss falls with compute: python scripts/scaling.py CONFIG.yaml [section.key=value ...]."""

from __future__ import annotations

import argparse

from thinker.runtime.errors import run_command


def main() -> int:
    """Train the ladder, fit, draw. Returns the exit status."""
    from thinker.benchmarks import scaling

    parser = argparse.ArgumentParser(description="Trains a ladder of sizes and fits loss against compute.")
    scaling.add_arguments(parser)
    scaling.run(parser.parse_args())
    return 0


if __name__ == "__main__":
    run_command(main)
