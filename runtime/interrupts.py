"""Ctrl-C, SIGTERM and SIGHUP in a command at any time: exit status 128 + signal and at most one line."""

import os
import signal
import sys
import time
from types import FrameType

TWICE_SECONDS = 0.1  # a repeated signal within this time is the same one: timeout(1) signals a process and its group
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def interrupt_once() -> None:
    """Let the first signal raise an exception, so that `finally` clauses run; a second one ends the process.

    Ctrl-C raises KeyboardInterrupt, other signals SystemExit. Ignored signals stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _interrupt)


def end_on_interrupt() -> None:
    """Let signals end the process, as an exception during interpreter exit would print a stack trace."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _interrupt(number: int, frame: FrameType) -> None:
    """Raise the exception. Ctrl-C ends the process during an import, which might catch the exception."""
    signal.signal(number, signal.SIG_IGN)
    time.sleep(TWICE_SECONDS)
    signal.signal(number, _leave)
    if number != signal.SIGINT:
        sys.exit(128 + number)
    code, caller = frame.f_code, frame
    while caller := caller.f_back:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(sys.stderr.fileno(), b"\ninterrupted by SIGINT (Ctrl-C) during an import\n")
            _leave(number, frame)
    raise KeyboardInterrupt(f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})")


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
