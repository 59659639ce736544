"""Ctrl-C, SIGTERM and SIGHUP in a command, however early, late or often: status 128 + signal and at most one line."""

import os
import signal
import sys
import time
from types import FrameType

TWICE_SECONDS = 0.1  # a signal that comes again so soon is the same one: timeout(1) signals a process and its group
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def interrupt_once() -> None:
    """Let the first signal raise an exception, so that `finally` clauses remove temporary files; a second one ends all.

    Ctrl-C raises KeyboardInterrupt, the others SystemExit. A signal that is ignored stays ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _interrupt)


def end_on_interrupt() -> None:
    """Let signals end the process: an exception while the interpreter ends would print a stack trace."""
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _interrupt(number: int, frame: FrameType) -> None:
    """Raise the exception; Ctrl-C inside an import, which may catch it and go on, ends the process instead."""
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
