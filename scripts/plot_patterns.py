"""Who may look at whom, drawn: python scripts/patterns.py [PATTERN ...] [--png FILE]."""

from __future__ import annotations

import sys
from pathlib import Path

from thinker.runtime.cli import ArgumentParser
from thinker.runtime.errors import UserError, run_command


def main() -> int:
    """Draw into a file or in the terminal. Returns the exit status."""
    parser = ArgumentParser(description="Draws who may look at whom: a row for each query, a column for each key.")
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help='such as "window(8) | global(2)" (default: one of each kind)'
    )
    parser.add_argument("--length", type=int, default=32, help="positions, up to 128 (default 32)")
    parser.add_argument("--heads", type=int, help="show so many where heads differ (default: those named, or 4)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it there instead of printing text")
    arguments = parser.parse_args()
    for name, most in (("length", 128), ("heads", 16)):  # what a picture still shows
        number = getattr(arguments, name)
        if number is not None and not 1 <= number <= most:
            raise UserError(f"--{name} is {number}; it must be from 1 to {most}")
    from thinker.interpretability.pattern_plots import GALLERY, as_text, draw, key, make_picture

    pictures = [make_picture(text, arguments.length, arguments.heads) for text in arguments.patterns or GALLERY]
    if arguments.png is None:
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a block shows a question mark
        print("\n".join([*map(as_text, pictures), key(pictures)]), end="")
        return 0
    figure, _ = draw(pictures)
    try:
        figure.savefig(arguments.png, format="png", dpi=160)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"cannot write {arguments.png}: {error.strerror}") from None
    print(f"picture {arguments.png}")
    return 0


if __name__ == "__main__":
    run_command(main)
