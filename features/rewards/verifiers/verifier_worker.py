"""The process in which verifiers run, so that one that hangs or crashes ends no training.

It reads lists of answers from standard input, one JSON array per line, and writes a line for each
answer: the rewards of each verifier, or an error.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from thinker.features.rewards.verifiers.load_verifier import load_verifier
from thinker.features.rewards.verifiers.verifier import Answer, checked_parts
from thinker.runtime.errors import UserError

MAX_LOGGED = 10  # errors whose traceback is printed
WATCH_SECONDS = 1.0


def main() -> None:
    """Answer the lines of standard input until it ends. Arguments: names of verifiers."""
    _end_with_parent()
    requests, replies = _take_standard_streams()
    verifiers = {}
    for name in sys.argv[1:]:
        try:
            verifiers[name] = load_verifier(name)
        except UserError as error:
            sys.exit(str(error))
        except Exception as error:  # of the user's file
            traceback.print_exc()
            sys.exit(_describe(name, error))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    own_id = os.getpid()
    logged: set[str] = set()
    for line in requests:
        for answer in json.loads(line):
            reply = _judge(verifiers, answer, logged)
            if os.getpid() != own_id:  # a child that a verifier has forked and that came back
                os._exit(1)
            print(json.dumps(reply), file=replies, flush=True)


def _end_with_parent() -> None:
    """End this process, and those that it has started, when the training is gone that started it. A
    verifier may be at work then, and may hang."""
    leads_its_group = hasattr(os, "killpg") and os.getpgrp() == os.getpid()
    if not leads_its_group:  # on Windows, or started by hand
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _take_standard_streams() -> tuple[TextIO, TextIO]:
    """Files for requests and replies. What verifiers print goes to standard error instead, and they
    have nothing to read."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _judge(verifiers: dict[str, Any], answer: dict[str, Any], logged: set[str]) -> dict[str, Any]:
    """{"rewards": {verifier: {name: reward}}} or {"error": one line}.

    answer: the fields of an Answer. logged: the errors whose traceback was printed, to which this
    adds.
    """
    rewards = {}
    for name, verifier in verifiers.items():
        fields = answer
        if len(verifiers) > 1:  # one of them may change the row
            fields = copy.deepcopy(answer)
        try:
            rewards[name] = checked_parts(verifier(Answer(**fields)))
        except Exception as error:
            reason = f"{name}: {_describe(name, error)}"
            if reason not in logged and len(logged) < MAX_LOGGED:
                logged.add(reason)
                traceback.print_exc()
            return {"error": reason}
    return {"rewards": rewards}


def _describe(name: str, error: Exception) -> str:
    """An error in one line, with its place in the user's file."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{reason[:300]}{_line(name, error)}"


def _line(name: str, error: Exception) -> str:
    """Where in a file of the user an error was raised, such as " (line 3)"; or ""."""
    path, _, _ = name.rpartition(":")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if path and frame.filename == os.path.abspath(path):
            return f" (line {frame.lineno})"
    return ""


if __name__ == "__main__":
    main()
