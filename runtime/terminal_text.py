"""Show control characters, which could move the cursor or change the title, as escapes on a terminal.

Files and pipes get all characters unchanged.
"""

import re
import sys
from typing import Any, TextIO

# Control characters of ASCII and Latin-1, except tabs and line breaks (including CR LF).
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def visible(text: str) -> str:
    """Replace control characters by escapes such as `\\x1b`."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def unescape(text: str) -> str:
    r"""Replace \n by a line break and \\ by a backslash in the value of a flag, as plain shell quotes cannot."""
    return re.sub(r"\\([\\n])", lambda match: "\n" if match[1] == "n" else match[1], text)


def for_stream(text: str, stream: TextIO | None) -> str:
    """Text to print to a stream: visible() if it is a terminal."""
    return visible(text) if stream is not None and stream.isatty() else text


class VisibleOutput:
    """Wrapper of a terminal stream that writes control characters as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text. Returns its length."""
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_terminal() -> None:
    """Stop printing control characters to standard output if it is a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = VisibleOutput(sys.stdout)
