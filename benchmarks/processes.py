"""Processes side by side, which end when one of them fails or a signal comes."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol


class ChildProcess:
    """One process, which another thread can stop at any time, even before it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def run(self, command: list[str | Path], environment: dict[str, str]) -> tuple[int, str]:
        """Run a command to its end. Returns its exit status and standard error; (1, "") after
        stop()."""
        with self._lock:
            if self._is_stopped:
                return 1, ""
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        stderr = self._process.communicate()[1]
        return self._process.returncode, stderr

    def stop(self) -> None:
        """Let the process end with SIGTERM, on which training finishes its step; never start it if
        it has not yet."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()


class Trainable(Protocol):
    """What train_side_by_side() needs of a run."""

    process: ChildProcess

    def train(self, threads: int | None) -> None:
        """Train to the end with so many threads, or the default number."""


def train_side_by_side(
    runs: Sequence[Trainable], jobs: int, threads: int | None, on_end: Callable[[Any], None]
) -> None:
    """Train `jobs` runs at a time with `threads` threads each, and call on_end(run) in this thread
    as they end.

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
            futures = {pool.submit(train, run): run for run in runs}
            for future in as_completed(futures):
                if future.result():
                    on_end(futures[future])
        finally:
            cancelled.set()  # Ctrl-C reaches only this thread
            for run in runs:
                run.process.stop()
