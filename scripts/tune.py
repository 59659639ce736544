"""Find learning rates and a batch size on short runs: python scripts/tune.py CONFIG
[section.key=value ...]."""

import sys

from thinker.runtime.errors import run_command
from thinker.runtime.registry import feature_command


def main() -> int:
    """Run `thinker sweep --halving`. Raises UserError if its feature is missing."""
    sys.argv.insert(1, "--halving")
    return feature_command("sweep")()


if __name__ == "__main__":
    run_command(main)
