"""Errors for users, and the entry point of all commands."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable

from thinker.runtime.constants import FULL_DISK
from thinker.runtime.interrupts import end_on_interrupt, interrupt_once
from thinker.runtime.standard_streams import ResilientStream, open_closed_streams, print_error
from thinker.runtime.terminal_text import protect_terminal


class UserError(Exception):
    """A mistake of the user. The message says in one line what is wrong and how to fix it. Exit status 2."""


class RunError(Exception):
    """A failure other than a mistake of the user. Exit status 1."""


def did_you_mean(word: str, words: Iterable[str], form: str = "{}") -> str:
    """End of a message about a misspelled word: "; did you mean ...?" with the closest of `words`, or ""."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {form.format(close[0])}?" if close else ""


OUT_OF_MEMORY = (
    "can't allocate memory|cannot allocate memory|out of memory|can't start new thread"  # in torch
)
WRONG_PATH = ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP")


def run_command(main: Callable[[], int]) -> None:
    """Run a command's main() and exit with its status.

    UserError prints one line to standard error and exits with status 2, as does a path that is missing, of the wrong
    kind or not permitted. RunError and other system errors (a failing or full disk, no memory) exit with status 1. A
    closed pipe ends the process silently, as for `cat`. Other errors are bugs and keep their traceback.
    """
    # Set before torch is imported, to make its OpenMP threads spin less while they wait. If another program used one of
    # two cores, a step took 5.8 times as long as without it, and 2.3 times with less spinning.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    interrupt_once()
    open_closed_streams()
    sys.stderr = ResilientStream(sys.stderr)  # a closed stderr must not end the command
    os.environ |= {"THINKER_COMMAND": "1", "MPLBACKEND": "agg"}  # for plot_style.py; no windows
    sys.stdout.reconfigure(errors="replace")  # unsupported characters become ?
    protect_terminal()
    try:
        try:
            os.getcwd()
        except FileNotFoundError as error:  # torch would crash
            raise UserError("the working directory was removed; cd to one that exists") from error
        status = main()
        sys.stdout.flush()
    except (UserError, RunError) as error:
        print_error(str(error))
        status = 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinker":
            raise
        remedy = "run `make demo` and use .venv/bin/python, or pip install -r requirements.txt"
        print_error(f"package {error.name} is not installed for {sys.executable}; {remedy}")
        status = 2
    except KeyboardInterrupt as error:
        print(f"\ninterrupted by SIGINT (Ctrl-C) {error}", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # avoids an error message at exit
        status = 1
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            OUT_OF_MEMORY, str(error), re.IGNORECASE
        ):
            raise
        name, message = (
            getattr(error, "filename", None),
            getattr(error, "strerror", None) or str(error),
        )
        if not isinstance(error, OSError):
            details = f": {message.splitlines()[0]}" if message else ""
            message = f"not enough memory{details}"
        if getattr(error, "errno", None) in FULL_DISK:
            where = f" (writing {name})" if name else ""
            message = f"the disk is full{where}; free some space and run the same command again"
        elif name:
            message = f"cannot read or write {name}: {error.strerror}"
        print_error(message)
        status = 2 if name and errno.errorcode.get(error.errno) in WRONG_PATH else 1
    end_on_interrupt()
    sys.exit(status)
