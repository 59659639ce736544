"""Errors that are shown to the user, and how a command ends."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable

from thinker.runtime.terminal_text import for_stream, protect_terminal


class UserError(Exception):
    """A mistake of the user: the message says in one line what is wrong and how to fix it. Exit status 2."""


class RunError(Exception):
    """A run that cannot continue for a reason other than a mistake of the user. Exit status 1."""


def did_you_mean(word: str, words: Iterable[str], form: str = "{}") -> str:
    """End of a message about a mistyped word: "; did you mean ...?" with the closest of `words` in `form`, or ""."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {form.format(close[0])}?" if close else ""


MAX_MESSAGE_CHARS = 1000  # a message may quote a file's value of any length
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def run_command(main: Callable[[], int]) -> None:
    """Run a command's main() and end the process with its exit status.

    UserError prints one line to standard error and ends with status 2, RunError and errors of the system (files that
    cannot be read or written, a full disk, no memory) with status 1. A closed pipe ends the process silently, as it
    ends `cat`. Other errors are bugs and keep their stack trace.
    """
    # Set before torch is imported: its OpenMP threads spin while they wait for each other. With another program on one
    # of two cores a step took 5.8 times as long as alone, with less spinning 2.3 times; alone it is not slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    protect_terminal()
    try:
        status = main()
        sys.stdout.flush()
    except (UserError, RunError) as error:
        line = for_stream(" ".join(str(error).split()), sys.stderr)
        print(f"error: {line[:MAX_MESSAGE_CHARS]}{' ...' if len(line) > MAX_MESSAGE_CHARS else ''}", file=sys.stderr)
        status = 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinker":
            raise
        remedy = "run `make demo` once and then .venv/bin/python, or pip install -r requirements.txt"
        print(f"error: {sys.executable} does not have the package {error.name}; {remedy}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter prints an error at exit
        status = 1
    except (OSError, MemoryError) as error:
        name, message = getattr(error, "filename", None), str(error) or "there is not enough memory"
        if getattr(error, "errno", None) in FULL_DISK:
            where = f" (writing {name})" if name else ""
            message = f"the disk is full{where}; make space and run the same command again"
        elif name:
            message = f"cannot read or write {name}: {error.strerror}"
        print(f"error: {for_stream(message, sys.stderr)}", file=sys.stderr)
        status = 1
    sys.exit(status)
