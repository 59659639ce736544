"""Standard streams of a command: closed streams, errors as one line, and readers that disappear."""

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from thinker.runtime.constants import FULL_DISK

MAX_MESSAGE_CHARS = 1000  # a message may quote a long value from a file


def open_closed_streams() -> None:
    """Open standard streams that were closed at the start (`>&-`), as the next file would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open


def print_error(message: str) -> None:
    """Print a message as one line of bounded length, without control characters.

    Also write it to the rank's error file, which torchrun prints at the end of its thirty lines about a failed rank.
    """
    characters = " ".join(message.split())
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters
    )
    line = f"error: {text[:MAX_MESSAGE_CHARS]}{' ...' if len(text) > MAX_MESSAGE_CHARS else ''}"
    print(line, file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        first = int(time.time()) - 1  # before the ranks that torchrun ends, as it reports the first
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": line, "timestamp": first}, file)


class ResilientStream:
    """A text stream that discards output once its reader (a terminal, a `tee`) is gone or the disk is full."""

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
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


@contextlib.contextmanager
def resilient_output() -> Iterator[None]:
    """Context in which errors of standard output cannot end training; run_command() does this for standard error."""
    with contextlib.redirect_stdout(ResilientStream(sys.stdout)):
        yield
