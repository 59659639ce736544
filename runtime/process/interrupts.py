"""Ctrl-C, SIGTERM and SIGHUP in a command: exit status 128 + signal and at most one line."""

import os
import signal
import sys
import time
from types import FrameType

# A repeated signal within this time is the same one: timeout(1) signals a process and its group.
TWICE_SECONDS = 0.1

_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # Windows has none
    _SIGNALS.append(signal.SIGHUP)


def interrupt_once() -> None:
    """Let the first signal raise an exception, so that `finally` clauses run.

    A second one ends the process. Ctrl-C raises KeyboardInterrupt, other signals SystemExit.
    Ignored signals stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _interrupt)


def end_on_interrupt() -> None:
    """Let signals end the process.

    An exception while the interpreter exits would print a stack trace.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _interrupt(number: int, frame: FrameType) -> None:
    """Raise the exception.

    During an import, which might catch the exception, Ctrl-C ends the process.
    """
    # A second signal would end the process before its cleanup, so ignore an echo of the first.
    signal.signal(number, signal.SIG_IGN)
    time.sleep(TWICE_SECONDS)
    signal.signal(number, _leave)
    if number != signal.SIGINT:
        sys.exit(128 + number)
    if _is_in_import(frame):
        os.write(sys.stderr.fileno(), b"\ninterrupted by SIGINT (Ctrl-C) during an import\n")
        _leave(number, frame)
    code = frame.f_code
    raise KeyboardInterrupt(f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})")


def _is_in_import(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        caller = caller.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
