"""Measure what early exit saves and changes: python scripts/early_exit.py PATH."""

from thinker.runtime.errors import run_command
from thinker.runtime.registry import feature_command


def main() -> int:
    """Run the command. Raises UserError if its feature is missing."""
    return feature_command("early-exit")()


if __name__ == "__main__":
    run_command(main)
