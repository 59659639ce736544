"""What people read on a terminal: control characters, which could move its cursor or change its title, made visible.

A file or a pipe gets every character as it is.
"""

import re
import sys
from typing import Any, TextIO

# All controls of ASCII and Latin-1 but tabs and line breaks; a carriage return only as part of one.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def visible(text: str) -> str:
    """The text with control characters as `\\x1b`."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def unescape(text: str) -> str:
    r"""A flag's text with \n as a line break and \\ as a backslash: no shell makes a line break in plain quotes."""
    return re.sub(r"\\([\\n])", lambda match: "\n" if match[1] == "n" else match[1], text)


def for_stream(text: str, stream: TextIO | None) -> str:
    """What to print to a stream: visible() where it is a terminal."""
    return visible(text) if stream is not None and stream.isatty() else text


class VisibleOutput:
    """A stream to a terminal that prints control characters visibly; all but writing is that of the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; returns its length."""
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_terminal() -> None:
    """From now on print no control character to a terminal by standard output, where texts go."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = VisibleOutput(sys.stdout)
