"""Plot attention patterns: python scripts/plot_patterns.py [PATTERN ...] [--png FILE]."""

from thinker.commands.patterns_command import main
from thinker.runtime.errors import run_command

if __name__ == "__main__":
    run_command(main)
