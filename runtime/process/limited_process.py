"""A Python process with limits, for work on untrusted input that may take for ever."""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path


class LimitedProcess:
    """Answers requests of one line each with one line each; one thread at a time.

    The process limits itself, with limit_next_request().
    """

    def __init__(self, program: str) -> None:
        """`program`: Python code that answers the lines of standard input until they end."""
        # The same sys.path.
        path = [str(Path(entry).resolve()) for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread uses address space
            text=True,
            encoding="ascii",
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )
        self._lock = threading.Lock()  # a thread must not read the reply to another
        atexit.register(self.close)

    def ask(self, request: str) -> str | None:
        """The reply to a request of ASCII text; None if the process has reached a limit.

        It has ended then.
        """
        reply = ""
        with self._lock:
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or was closed
                self.process.stdin.write(request + "\n")
                self.process.stdin.flush()
                reply = self.process.stdout.readline()
            if not reply:
                self.close()
        return reply or None

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        self.process.kill()
        self.process.communicate()


def limit_next_request(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit the memory of this process, and its CPU time from now on.

    macOS has no limit of memory, and Windows has none at all.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource
        import time

        seconds = int(time.process_time()) + 1 + cpu_seconds
        for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory_bytes)):
            _, maximum = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit, maximum))
