"""Being stopped: signals, and a terminal or pipe that goes away."""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from thinker.runtime import interrupts
from thinker.runtime.errors import FULL_DISK


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
        handled = [number for number in self.NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
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


class ResilientStream:
    """A text stream that loses what is written once its reader (a terminal, a `tee`) has gone or the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as any stream does."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush as any stream does."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, method: Callable, *args: str) -> None:
        try:
            method(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, *FULL_DISK):
                raise
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)


@contextlib.contextmanager
def resilient_output() -> Iterator[None]:
    """Make standard output and standard error streams that cannot end a training."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(ResilientStream(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(ResilientStream(sys.stderr)))
        yield
