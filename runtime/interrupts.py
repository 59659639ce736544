"""Ctrl-C in a command, however early, late or often it comes: status 130 and at most one line."""

import os
import signal
import sys
from types import FrameType


def interrupt_once() -> None:
    """Let the first Ctrl-C raise KeyboardInterrupt and a second one end the process, unless Ctrl-C is ignored."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process: an exception while the interpreter ends would print a stack trace."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def _interrupt(number: int, frame: FrameType) -> None:
    """Raise KeyboardInterrupt; inside an import, which may catch it and go on, end the process instead."""
    signal.signal(number, _leave)
    code, caller = frame.f_code, frame
    while caller := caller.f_back:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(sys.stderr.fileno(), b"\ninterrupted by SIGINT (Ctrl-C) during an import\n")
            _leave(number, frame)
    raise KeyboardInterrupt(f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})")


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
