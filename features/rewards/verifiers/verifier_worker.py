"""The process in which verifiers run, so that one that hangs or crashes ends no training.

It reads lists of answers from standard input, one JSON array per line, and writes a line for each
answer: the rewards of each verifier, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

from thinker.features.rewards.verifiers.load_verifier import load_verifier
from thinker.features.rewards.verifiers.verifier import Answer, checked_parts
from thinker.runtime.errors import UserError


def main() -> None:
    """Answer the lines of standard input until it ends. Arguments: names of verifiers."""
    requests, replies = _take_standard_streams()
    try:
        verifiers = {name: load_verifier(name) for name in sys.argv[1:]}
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        for answer in json.loads(line):
            reply = _judge(verifiers, Answer(**answer))
            print(json.dumps(reply), file=replies, flush=True)


def _take_standard_streams() -> tuple[TextIO, TextIO]:
    """Files for requests and replies. What verifiers print goes to standard error instead, and they
    have nothing to read."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _judge(verifiers: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """{"rewards": {verifier: {name: reward}}} or {"error": one line}."""
    rewards = {}
    for name, verifier in verifiers.items():
        try:
            rewards[name] = checked_parts(verifier(answer))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return {"error": f"{name}: {reason[:300]}{_line(name, error)}"}
    return {"rewards": rewards}


def _line(name: str, error: Exception) -> str:
    """Where in a file of the user an error was raised, such as " (line 3)"; or ""."""
    path, _, _ = name.rpartition(":")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if path and frame.filename == path:
            return f" (line {frame.lineno})"
    return ""


if __name__ == "__main__":
    main()
