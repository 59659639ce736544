"""Render chat templates in a process of its own: a stranger's template is a program, which may never end."""

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from thinker.data.tokenizer import Tokenizer
from thinker.runtime.errors import UserError

CPU_SECONDS = 10  # for one conversation; real templates take less than a millisecond
MEMORY_BYTES = 2 << 30  # of the whole process; the libraries take less than a tenth
MAX_TEXT_CHARS = 1 << 26
# The process finds packages where this one does. Its standard output becomes its standard error: libraries may print.
START = "import sys; sys.path[:] = {path!r}; from thinker.data import chat_template; chat_template.serve({seconds})"


class Renderer:
    """A process that renders conversations, one per line of JSON.

    Linux ends it after CPU_SECONDS of work on one conversation, or refuses it more than MEMORY_BYTES. macOS bounds the
    seconds only, and Windows neither.
    """

    def __init__(self) -> None:
        path = [str(Path(entry).resolve()) for entry in sys.path]
        command = [sys.executable, "-c", START.format(path=path, seconds=CPU_SECONDS)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each of its threads takes address space
        # A session of its own: Ctrl-C in the terminal is not for this process.
        self.process = subprocess.Popen(
            command, **pipes, env=environment, text=True, encoding="ascii", start_new_session=True
        )
        atexit.register(self.close)

    def render(self, **request: Any) -> tuple[str, list[tuple[int, int]]]:
        """See render()."""
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        if not reply:
            self.close()
            limits = f"{CPU_SECONDS} s of computing or {MEMORY_BYTES >> 30} GB of memory"
            raise UserError(f"the chat template does not end, or needs more than {limits} for one conversation")
        text, spans, error = json.loads(reply)
        if error is not None:
            raise UserError(error)
        return text, [(start, end) for start, end in spans]

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        _renderer.cache_clear()
        self.process.kill()
        self.process.communicate()


@functools.cache
def _renderer() -> Renderer:
    return Renderer()


def render(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool, mark_answers: bool
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text by the tokenizer's template and, with mark_answers, where the answers are that it marks.

    Raises UserError where the template refuses the conversation, is no template, or exceeds the limits; and where
    transformers is not installed.
    """
    request = {"template": tokenizer.chat_template, "names": tokenizer.special_tokens_map, "messages": messages}
    return _renderer().render(**request, add_generation_prompt=add_generation_prompt, mark_answers=mark_answers)


def serve(cpu_seconds: int) -> None:
    """What the process does: read requests from standard input until it ends, and answer each."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        _limit(cpu_seconds)
        try:
            reply = _reply(**json.loads(line))
        except MemoryError:
            break
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _limit(cpu_seconds: int) -> None:
    """Bound the memory of this process, and the time that it will have used at the end of one more conversation."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no limits, macOS none for memory
        import resource
        import time

        seconds = int(time.process_time()) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _reply(
    template: str, messages: list, add_generation_prompt: bool, mark_answers: bool, names: dict[str, str]
) -> tuple[str, list, str | None]:
    """The text, the spans of its answers, and None; or what is wrong."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=mark_answers, **names,
        )  # fmt: skip
    except ImportError:
        return "", [], "conversations need the library transformers: pip install transformers jinja2"
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, which can fail in any way
        return "", [], f"the chat template refuses a conversation: {error or type(error).__name__}"
    if len(texts[0]) > MAX_TEXT_CHARS:
        return "", [], f"the chat template makes {len(texts[0]):,} characters of one conversation"
    return texts[0], spans[0] if mark_answers else [], None
