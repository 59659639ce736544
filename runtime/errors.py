"""Errors for users, and the entry point of all commands."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from thinker.runtime.constants import FULL_DISK
from thinker.runtime.process.interrupts import end_on_interrupt, interrupt_once
from thinker.runtime.process.standard_streams import (
    ResilientStream,
    open_closed_streams,
    print_error,
    protect_terminal,
)

# Messages of torch's RuntimeErrors.
OUT_OF_MEMORY = re.compile(
    "can't allocate memory|cannot allocate memory|out of memory|can't start new thread",
    re.IGNORECASE,
)
WRONG_PATH = ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP")


class UserError(Exception):
    """A mistake of the user. Exit status 2.

    The message says in one line what is wrong and how to fix it.
    """


class RunError(Exception):
    """A failure other than a mistake of the user. Exit status 1."""


def is_checkout() -> bool:
    """Whether this code runs in the repository, and not in an installed package."""
    return (Path(__file__).parents[1] / "pyproject.toml").exists()


def install_command(extra: str) -> str:
    """The command that installs an extra, in a checkout or beside an installed package."""
    package = "." if is_checkout() else "thinker"
    quote = '"' if os.name == "nt" else "'"  # cmd.exe does not know '
    return f"pip install {quote}{package}[{extra}]{quote}"


def did_you_mean(word: str, words: Iterable[str], form: str = "{}", cutoff: float = 0.5) -> str:
    """End of a message about a misspelled word: "; did you mean ...?", or "" if none is close.

    cutoff: how similar a word must be, 1 if equal, as in difflib.
    """
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    if not close:
        return ""
    return f"; did you mean {form.format(close[0])}?"


def misspelled(words: Iterable[str], names: Iterable[str]) -> str:
    """End of a message about names that are missing: "; did you mean NAME instead of WORD?", or ""
    if no word is nearly one of them."""
    names = list(names)
    for word in words:
        close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.7)
        if close and word not in names:
            return f"; did you mean {close[0]} instead of {word}?"
    return ""


def run_command(main: Callable[[], int]) -> None:
    """Run a command's main() and exit with its status.

    UserError prints one line to standard error and exits with status 2, as does a path that is
    missing, of the wrong kind or not permitted. RunError and other system errors (a failing or full
    disk, no memory) exit with status 1. A closed pipe ends the process silently, as for `cat`.
    Other errors are bugs and keep their traceback.
    """
    _prepare_process()
    try:
        _check_working_directory()
        status = main()
        sys.stdout.flush()
    except UserError as error:
        print_error(str(error))
        status = 2
    except RunError as error:
        print_error(str(error))
        status = 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinker":
            raise
        remedy = "run pip install thinker"
        if is_checkout():
            remedy = "run `make demo` and use .venv/bin/python, or pip install -r requirements.txt"
        print_error(f"package {error.name} is not installed for {sys.executable}; {remedy}")
        status = 2
    except KeyboardInterrupt as error:
        print(f"\ninterrupted by SIGINT (Ctrl-C) {error}", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # Python flushes standard output at exit, which would print an error message.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        status = 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        print_error(_describe_memory_error(error))
        status = 1
    except OSError as error:
        print_error(_describe_system_error(error))
        is_users = error.filename and errno.errorcode.get(error.errno) in WRONG_PATH
        status = 2 if is_users else 1
    end_on_interrupt()
    sys.exit(status)


def _prepare_process() -> None:
    """Set up the environment, the signals and the standard streams of a command."""
    # Set before torch is imported, to make its OpenMP threads spin less while they wait. If another
    # program used one of two cores, a step took 5.8 times as long as without it, and 2.3 times with
    # less spinning.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ["THINKER_COMMAND"] = "1"  # for plot_style.py
    os.environ["MPLBACKEND"] = "agg"  # no windows
    interrupt_once()
    open_closed_streams()
    sys.stderr = ResilientStream(sys.stderr)  # a closed stderr must not end the command
    sys.stdout.reconfigure(errors="replace")  # unsupported characters become ?
    protect_terminal()


def _check_working_directory() -> None:
    """Raise UserError if the working directory is gone, where torch would crash."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory was removed; cd to one that exists") from error


def _describe_memory_error(error: MemoryError | RuntimeError) -> str:
    lines = str(error).splitlines()
    if not lines:
        return "not enough memory"
    return f"not enough memory: {lines[0]}"


def _describe_system_error(error: OSError) -> str:
    if error.errno in FULL_DISK:
        where = f" (writing {error.filename})" if error.filename else ""
        return f"the disk is full{where}; free some space and run the same command again"
    if error.filename:
        return f"cannot read or write {error.filename}: {error.strerror}"
    return error.strerror or str(error)
