"""Errors that a user may see, and how a command ends."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
    """A mistake of the user: the message is one line that says what is wrong and what would be right."""


class RunError(Exception):
    """A run that cannot continue, through no mistake of the user: one line, exit status 1."""


def did_you_mean(word: str, words: Iterable[str], form: str = "{}") -> str:
    """A question that names the word closest to a mistyped one, to end an error message with; "" if none is near.

    The word is shown in `form`, such as "model.{}".
    """
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {form.format(close[0])}?" if close else ""


MAX_MESSAGE_CHARS = 1000  # a value in a stranger's file may be of any length
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def run_command(main: Callable[[], int]) -> None:
    """Run a command's main() and end the process with its exit status.

    UserError becomes one line on standard error and status 2; RunError and a full disk one line and status 1; a reader
    that closed our pipe ends us quietly, as it does `cat`. Anything else is our own fault and keeps its stack trace.
    """
    # Before torch is imported: its OpenMP threads spin while they wait for each other. With another program on one of
    # two cores a step took 5.8 times as long as alone; with less spinning 2.3 times, and alone no longer than before.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        status = main()
        sys.stdout.flush()
    except (UserError, RunError) as error:
        line = " ".join(str(error).split())
        print(
            f"error: {line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + ' ...'}", file=sys.stderr
        )
        status = 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinker":
            raise
        print(
            f"error: {sys.executable} does not have the package {error.name}; run `make demo` once and then "
            ".venv/bin/python, or pip install -r requirements.txt",
            file=sys.stderr,
        )
        status = 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while exiting
        status = 1
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f" (writing {error.filename})" if error.filename else ""
        print(f"error: the disk is full{where}; make space and run the same command again", file=sys.stderr)
        status = 1
    sys.exit(status)
