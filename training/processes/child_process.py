"""Processes side by side, which end when one of them fails or a signal comes."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

POLL_SECONDS = 0.5  # between two calls of on_wait()


class ChildProcess:
    """One process, which another thread can stop at any time, even before it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.is_stopped = False  # whether stop() was called

    def run(self, command: list[str | Path], environment: dict[str, str]) -> tuple[int, str]:
        """Run a command to its end. Returns its exit status and standard error; (1, "") after
        stop()."""
        with self._lock:
            if self.is_stopped:
                return 1, ""
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                # So that Ctrl-C does not reach it: with the signal of stop(), there would be two,
                # which end it before it has saved. Windows has no sessions.
                start_new_session=True,
            )
        stderr = self._process.communicate()[1]
        return self._process.returncode, stderr

    def stop(self) -> None:
        """Let the process end with SIGTERM, on which training finishes its step; never start it if
        it has not yet.

        On Windows, Ctrl-C has reached it already, and any other signal would end it at once.
        """
        with self._lock:
            self.is_stopped = True
            if self._process is None or sys.platform == "win32":
                return
            if self._process.poll() is None:
                self._process.terminate()


class Trainable(Protocol):
    """What train_side_by_side() needs of a run."""

    process: ChildProcess

    def train(self, threads: int | None) -> None:
        """Train to the end with so many threads, or the default number."""


def train_side_by_side(
    runs: Sequence[Trainable],
    jobs: int,
    threads: int | None,
    on_end: Callable[[Any], None],
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Train `jobs` runs at a time with `threads` threads each, and call on_end(run) in this thread
    as they end, and on_wait() twice a second.

    When a run fails, or a signal raises an exception here, the others stop or never start, and the
    error is raised.
    """
    cancelled = threading.Event()

    def train(run: Trainable) -> bool:
        if cancelled.is_set():
            return False
        try:
            run.train(threads)
        except BaseException:
            cancelled.set()  # here, before this thread can start the next run
            raise
        return True

    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures: dict[Future[bool], Trainable] = {pool.submit(train, run): run for run in runs}
            pending = set(futures)
            while pending:
                ended, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                for future in ended:
                    if future.result():
                        on_end(futures[future])
                on_wait()
        finally:
            cancelled.set()
            for run in runs:
                run.process.stop()
