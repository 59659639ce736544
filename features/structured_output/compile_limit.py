"""Refuse schemas and regular expressions that take too long to compile.

llguidance compares regular expressions with each other, which takes exponential time for some, and
has no limit for that; a few make it crash. So a grammar is first compiled in a process that has
limits, and whose end harms nobody.
"""

import functools
import json
import sys
import threading

from thinker.runtime.errors import UserError
from thinker.runtime.process.limited_process import LimitedProcess, limit_next_request

CPU_SECONDS = 1  # one more at times; schemas of a thousand properties take a tenth
MEMORY_BYTES = 1 << 30
PROGRAM = (
    "from thinker.features.structured_output import compile_limit; "
    f"compile_limit.serve({CPU_SECONDS})"
)

_lock = threading.Lock()


def check_compile_time(kind: str, grammar: str) -> None:
    """Raise UserError for a grammar that takes too long to compile, or too much memory."""
    with _lock:
        reply = _process().ask(json.dumps(grammar))
        if reply is None:
            _process.cache_clear()
    if reply is None:
        limits = f"more than {CPU_SECONDS} s or {MEMORY_BYTES >> 30} GB of memory"
        raise UserError(f"{kind} is too complex: it needs {limits} to compile; simplify it")


@functools.cache
def _process() -> LimitedProcess:
    return LimitedProcess(PROGRAM)


def serve(cpu_seconds: int) -> None:
    """Compile the grammars in standard input until it ends; whoever asks reports their mistakes."""
    from llguidance import LLMatcher

    for line in sys.stdin:
        limit_next_request(cpu_seconds, MEMORY_BYTES)
        LLMatcher.validate_grammar(json.loads(line))
        print("compiled", flush=True)
