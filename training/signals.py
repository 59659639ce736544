"""Being stopped by a signal: the training finishes its step and saves."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

from thinker.runtime import interrupts


class SignalHandler:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `number`; a second one ends the process at once.

    A signal that was ignored when the process began (nohup, a shell's background job) stays ignored. To one of several
    ranks (`together`) the launcher passes on a signal that it may have received itself: what comes within ECHO_SECONDS
    after the first is taken for the same one; so is, in any process, what comes within TWICE_SECONDS.
    """

    ECHO_SECONDS = 5.0
    NUMBERS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name))

    def __init__(self, together: bool = False) -> None:
        self.number, self.together = 0, together
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "SignalHandler":
        is_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
        handled = [number for number in self.NUMBERS if is_main and signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}
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
            self._handle_all(signal.SIG_DFL)  # the system's own, which does not wait for Python
        if self.number:
            signal.raise_signal(number)
        self.number, self._first_at = number, time.monotonic()
        with contextlib.suppress(OSError):  # not through Python's stream, which the signal may have interrupted
            message = f"\n{signal.Signals(number).name}: finishing this step and saving; once more leaves at once\n"
            os.write(sys.stderr.fileno(), message.encode())

    def _handle_all(self, handler: Any) -> None:
        for number in self._previous:
            signal.signal(number, handler)
