"""Stop on a signal: training finishes its step and saves."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from thinker.runtime.process import interrupts


class SignalHandler:
    """Context in which the first SIGINT, SIGTERM or SIGHUP sets `number`, and a second one ends the
    process at once.

    A signal that is ignored when the process starts (nohup, a shell's background job) stays
    ignored. The launcher of several ranks (`together`) forwards a signal that the ranks may also
    receive directly, so signals within ECHO_SECONDS of the first count as the same one. In any
    process, so do signals within TWICE_SECONDS.
    """

    ECHO_SECONDS = 5.0
    NAMES = ("SIGHUP", "SIGINT", "SIGTERM")  # as far as the system has them

    def __init__(self, together: bool = False) -> None:
        self.number = 0
        self.together = together
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "SignalHandler":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers
        for name in self.NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.number and time.monotonic() < self._first_at + self.ECHO_SECONDS:
            return
        if not self.number and not self.together:
            self._handle_all(signal.SIG_IGN)
            time.sleep(interrupts.TWICE_SECONDS)
        if self.number or not self.together:
            # The handler of the system, which does not wait for Python.
            self._handle_all(signal.SIG_DFL)
        if self.number:
            signal.raise_signal(number)
        self._first_at = time.monotonic()
        self.number = number
        name = signal.Signals(number).name
        message = f"\n{name}: finishing this step and saving; repeat to stop at once\n"
        with contextlib.suppress(OSError):
            # Not Python's stream, which the signal may have interrupted.
            os.write(sys.stderr.fileno(), message.encode())

    def _handle_all(self, handler: Any) -> None:
        for number in self._previous:
            signal.signal(number, handler)
