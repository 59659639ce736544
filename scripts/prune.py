"""Remove heads, neurons, layers and weights from a model: python scripts/prune.py PATH --out
FOLDER."""

from thinker.runtime.errors import run_command
from thinker.runtime.registry import feature_command


def main() -> int:
    """Run the command. Raises UserError if its feature is missing."""
    return feature_command("prune")()


if __name__ == "__main__":
    run_command(main)
