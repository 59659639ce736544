"""A command that is stopped: by Ctrl-C, with status 130 and at most one line, or by SIGTERM or SIGHUP."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
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


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that `finally` clauses run; by default they end the process at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for these clauses
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if is_main and hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
