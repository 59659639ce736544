"""Being stopped: signals, and a terminal or pipe that goes away."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from thinker.runtime.errors import FULL_DISK


class SignalHandler:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `number`; a second one ends the process at once.

    A signal that was ignored when the process began (nohup, a shell's background job) stays ignored.

    Args: together: this is one of several ranks, and whoever started them passes on a signal that they may have got
        themselves; what comes within ECHO seconds after the first is taken for the same one.
    """

    ECHO = 5.0

    NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

    def __init__(self, together: bool = False) -> None:
        self.number = 0
        self.together = together
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        ours = [number for number in self.NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in ours}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.number != 0

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.number and time.monotonic() < self._first_at + self.ECHO:
            return
        for each in self._before if self.number or not self.together else ():
            signal.signal(each, signal.SIG_DFL)  # the system's own: it does not wait for Python's turn
        if self.number:
            os.kill(os.getpid(), number)
        self.number, self._first_at = number, time.monotonic()
        with contextlib.suppress(OSError):  # past Python's stream, in whose midst the signal may have come
            os.write(sys.stderr.fileno(), b"\nfinishing this step and saving; once more leaves at once\n")


def is_compile_error(error: RuntimeError) -> bool:
    """Whether it says that compiling failed: Ctrl-C in a terminal reaches the compiler, too."""
    from torch._dynamo.exc import BackendCompilerFailed

    return isinstance(error, BackendCompilerFailed)


class Lasting:
    """A text stream whose reader may go away: a closed terminal, or a `tee` that Ctrl-C ended with us.

    From then on what is written is lost, and nothing else is. Likewise where it is a file on a full disk.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        with self._whatever_happens():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of any stream."""
        with self._whatever_happens():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _whatever_happens(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, *FULL_DISK):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and standard error that cannot end a training."""
    with contextlib.ExitStack() as stack:
        streams = [stream or stack.enter_context(open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr)]
        stack.enter_context(contextlib.redirect_stdout(Lasting(streams[0])))
        stack.enter_context(contextlib.redirect_stderr(Lasting(streams[1])))
        yield
