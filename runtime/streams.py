"""The standard streams of a command: opened where they are closed, and an error as one line."""

import contextlib
import json
import os
import sys
import time

MAX_MESSAGE_CHARS = 1000  # a message may quote a file's value of any length


def open_closed_streams() -> None:
    """Open the standard streams that the process was started without (`>&-`): the next file would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open


def print_error(message: str) -> None:
    """Print a message as one line, of bounded length and without what would control the terminal.

    torchrun prints thirty lines when a rank has failed; the last of them repeats what is in the rank's error file.
    """
    characters = " ".join(message.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters)
    line = f"error: {text[:MAX_MESSAGE_CHARS]}{' ...' if len(text) > MAX_MESSAGE_CHARS else ''}"
    print(line, file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        first = int(time.time()) - 1  # before the ranks that torchrun then ends: it takes the first for the cause
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": line, "timestamp": first}, file)
