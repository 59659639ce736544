"""Verifiers in a process of their own, with a time limit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from thinker.features.rewards.verifiers.verifier import Answer
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

WORKER = "thinker.features.rewards.verifiers.verifier_worker"
# Without the current folder in the path of the worker, in which a random.py may lie.
SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
MAX_REASONS = 10  # that are told apart, as a reason may hold the answer
OTHER_REASONS = "other reasons"
START_SECONDS = 120.0  # for the imports of a user's module
MAX_ENDED = 5  # processes that may end before an answer has a reward
SLOW = "; what it loads belongs at the top of its file, outside the function"
Rewards = dict[str, dict[str, float]]  # by verifier, then by name


class VerifierProcess:
    """Judges answers. One that a verifier cannot judge has no reward: the verifier raised an error,
    returned no finite number, took too long, or ended its process.

    `failures` counts these by reason. The first of each is printed as one line. Raises UserError if
    a verifier cannot be loaded, or if the first answers all take too long or end the process.
    """

    def __init__(self, names: Sequence[str], timeout: float, log: Path) -> None:
        self.names = list(names)
        self.timeout = timeout  # seconds per answer
        self.log = log  # file for what verifiers print
        self.failures: Counter[str] = Counter()
        self._has_judged = False
        self._n_ended = 0  # processes, before an answer had a reward
        self._label = self.names[0] if len(self.names) == 1 else f"one of {', '.join(self.names)}"
        self._process: subprocess.Popen | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._start()

    def judge(self, answers: Sequence[Answer]) -> list[Rewards | None]:
        """The rewards of each answer; None for one that could not be judged."""
        judged: list[Rewards | None] = []
        while len(judged) < len(answers):
            # After a failure that ended the process, a new one judges what is left.
            judged += self._judge_some(answers[len(judged) :])
        return judged

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _kill_all(self._process)
            self._process.wait()
            with suppress(BrokenPipeError):  # of answers that it did not read
                self._process.stdin.close()
            self._process = None

    def _judge_some(self, answers: Sequence[Answer]) -> list[Rewards | None]:
        """As judge(), up to the first answer with which the process ends."""
        if self._process is None:
            self._start()
        self._send(answers)
        judged: list[Rewards | None] = []
        while len(judged) < len(answers) and self._process is not None:
            reply = self._receive()
            if "error" in reply:
                self._count(reply["error"])
            else:
                self._has_judged = True
            judged.append(reply.get("rewards"))
        return judged

    def _count(self, reason: str) -> None:
        if reason not in self.failures and len(self.failures) >= MAX_REASONS:
            reason = OTHER_REASONS
        if reason not in self.failures:
            Progress.write(f"no reward: {reason}", file=sys.stderr)  # above a progress bar
        self.failures[reason] += 1

    def _send(self, answers: Sequence[Answer]) -> None:
        """Ask for rewards. The process reads all answers before it judges the first, so that a
        verifier that hangs does not block this."""
        line = json.dumps([vars(answer) for answer in answers], default=str)
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process is gone, as _receive() finds

    def _receive(self) -> dict[str, Any]:
        """The next reply, or an error. After a crash or a timeout the process is gone."""
        try:
            line = self._replies.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            return self._ended(f"took longer than {self.timeout:g} s (train.grpo.timeout)", SLOW)
        if not line:
            status = self._process.wait()
            self.close()
            return self._ended(f"ended its process (status {status})")
        return json.loads(line)

    def _ended(self, what: str, advice: str = "") -> dict[str, Any]:
        """The reply for an answer with which the process ended. Raises UserError if no answer has a
        reward after MAX_ENDED of them."""
        self._n_ended += 1
        if not self._has_judged and self._n_ended == MAX_ENDED:
            raise UserError(
                f"{self._label} {what} with {MAX_ENDED} answers, before any had a reward{advice}"
            )
        return {"error": f"{self._label} {what}"}

    def _start(self) -> None:
        command = [sys.executable, *SAFE_PATH, "-m", WORKER, *self.names]
        with self.log.open("ab") as log:
            start = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C ends training after its step, which needs rewards
            )
        self._replies = queue.SimpleQueue()
        arguments = (self._process.stdout, self._replies)
        threading.Thread(target=_read_lines, args=arguments, daemon=True).start()
        try:
            is_ready = bool(self._replies.get(timeout=START_SECONDS))
        except queue.Empty:
            is_ready = False
        if not is_ready:
            self.close()
            with self.log.open("rb") as log:
                log.seek(start)
                lines = log.read().decode(errors="replace").splitlines()
            reason = lines[-1].strip() if lines else "its process ended"
            raise UserError(f"{', '.join(self.names)} cannot judge answers: {reason}")


def _kill_all(process: subprocess.Popen) -> None:
    """Kill a process, and those that it has started where a group of processes can be killed."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_lines(file: TextIO, lines: queue.SimpleQueue[str]) -> None:
    """Put the lines of a file into a queue, and "" at its end."""
    for line in file:
        lines.put(line)
    lines.put("")
    file.close()
