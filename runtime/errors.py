"""Errors that are shown to the user, and how a command ends."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable

from thinker.runtime.constants import FULL_DISK
from thinker.runtime.interrupts import end_on_interrupt, interrupt_once
from thinker.runtime.streams import ResilientStream, open_closed_streams, print_error
from thinker.runtime.terminal_text import protect_terminal


class UserError(Exception):
    """A mistake of the user: the message says in one line what is wrong and how to fix it. Exit status 2."""


class RunError(Exception):
    """A run that cannot continue for a reason other than a mistake of the user. Exit status 1."""


def did_you_mean(word: str, words: Iterable[str], form: str = "{}") -> str:
    """End of a message about a mistyped word: "; did you mean ...?" with the closest of `words` in `form`, or ""."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {form.format(close[0])}?" if close else ""


OUT_OF_MEMORY = "can't allocate memory|cannot allocate memory|out of memory|can't start new thread"  # torch's words
WRONG_PATH = ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP")


def run_command(main: Callable[[], int]) -> None:
    """Run a command's main() and end the process with its exit status.

    UserError prints one line to standard error and ends with status 2, as does a path that is missing, of the wrong
    kind or not permitted. RunError and other errors of the system (a disk that fails or is full, no memory) end with
    status 1. A closed pipe ends the process silently, as it ends `cat`. Other errors are bugs and keep their traceback.
    """
    # Set before torch is imported: its OpenMP threads spin while they wait for each other. With another program on one
    # of two cores a step took 5.8 times as long as alone, with less spinning 2.3 times; alone it is not slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    interrupt_once()
    open_closed_streams()
    sys.stderr = ResilientStream(sys.stderr)  # notes that nobody can read must not cost a result
    os.environ |= {"THINKER_COMMAND": "1", "MPLBACKEND": "agg"}  # plot_style.py reads them; nothing is shown
    sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot show become question marks
    protect_terminal()
    try:
        try:
            os.getcwd()
        except FileNotFoundError as error:  # torch would end the process
            raise UserError("the working directory was removed; change to one that exists") from error
        status = main()
        sys.stdout.flush()
    except (UserError, RunError) as error:
        print_error(str(error))
        status = 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "thinker":
            raise
        remedy = "run `make demo` once and then .venv/bin/python, or pip install -r requirements.txt"
        print_error(f"{sys.executable} does not have the package {error.name}; {remedy}")
        status = 2
    except KeyboardInterrupt as error:
        print(f"\ninterrupted by SIGINT (Ctrl-C) {error}", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter prints an error at exit
        status = 1
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search(OUT_OF_MEMORY, str(error), re.IGNORECASE):
            raise
        name, message = getattr(error, "filename", None), getattr(error, "strerror", None) or str(error)
        if not isinstance(error, OSError):
            details = f": {message.splitlines()[0]}" if message else ""
            message = f"there is not enough memory{details}"
        if getattr(error, "errno", None) in FULL_DISK:
            where = f" (writing {name})" if name else ""
            message = f"the disk is full{where}; make space and run the same command again"
        elif name:
            message = f"cannot read or write {name}: {error.strerror}"
        print_error(message)
        status = 2 if name and errno.errorcode.get(error.errno) in WRONG_PATH else 1
    end_on_interrupt()
    sys.exit(status)
