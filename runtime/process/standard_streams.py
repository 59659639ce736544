"""Standard streams of a command: closed ones, readers that disappear, errors, and terminals."""

import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from thinker.runtime.constants import FULL_DISK

MAX_MESSAGE_CHARS = 1000  # a message may quote a long value from a file

# Control characters of ASCII and Latin-1, except tabs and line breaks (including CR LF).
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def open_closed_streams() -> None:
    """Open standard streams that were closed at the start (`>&-`).

    Otherwise the next file would get their number, and whatever prints would write into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open


def print_error(message: str) -> None:
    """Print a message as one line of bounded length, without control characters.

    Also write it to the rank's error file, which torchrun prints at the end of its thirty lines
    about a failed rank.
    """
    text = _escape_unprintable(" ".join(message.split()))
    if len(text) > MAX_MESSAGE_CHARS:
        text = text[:MAX_MESSAGE_CHARS] + " ..."
    line = f"error: {text}"
    print(line, file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun reports the first failure, so be earlier than the ranks that it ends.
        timestamp = int(time.time()) - 1
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": line, "timestamp": timestamp}, file)


def _escape_unprintable(text: str) -> str:
    characters = []
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape").decode()
        characters.append(char)
    return "".join(characters)


class ResilientStream:
    """A text stream that discards output once its reader is gone or the disk is full.

    The reader may be a terminal that was closed, or a `tee` that was ended.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, method: Callable, *args: str) -> None:
        try:
            method(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, *FULL_DISK):
                raise
            # Nobody can read what follows, so discard it without further errors.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


@contextlib.contextmanager
def resilient_output() -> Iterator[None]:
    """Context in which errors of standard output cannot end training.

    run_command() does the same for standard error.
    """
    with contextlib.redirect_stdout(ResilientStream(sys.stdout)):
        yield


def visible(text: str) -> str:
    """Replace control characters by escapes such as `\\x1b`."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def for_stream(text: str, stream: TextIO | None) -> str:
    """Text to print to a stream: visible() if it is a terminal.

    Control characters could move its cursor or change its title. Files and pipes get all
    characters unchanged.
    """
    if stream is None or not stream.isatty():
        return text
    return visible(text)


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
