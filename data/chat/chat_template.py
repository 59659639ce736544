"""Render chat templates in a separate process.

An untrusted template is a program that may never end.
"""

import contextlib
import functools
import json
import sys
import threading
from datetime import datetime
from typing import Any, NamedTuple

from thinker.data.tokenizers.tokenizer import Span, Tokenizer
from thinker.runtime.errors import UserError, install_command
from thinker.runtime.process.limited_process import LimitedProcess, limit_next_request

CPU_SECONDS = 10  # per conversation; real templates take less than a millisecond
MEMORY_BYTES = 2 << 30  # for the whole process; the libraries use less than a tenth
MAX_TEXT_CHARS = 1 << 26

# Variables of a template that the caller of render() sets by other means.
RESERVED = (
    "messages",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)

Cut = tuple[int, bool]


class Rendering(NamedTuple):
    """A rendered beginning of a conversation."""

    text: str
    answers: list[Span]  # that the template marks
    # What is not the template's, in order: (start, end, origin); see traced_text.
    origins: list[tuple[int, int, int]]


class Renderer(LimitedProcess):
    """A process that renders conversations, one per line of JSON.

    Linux limits it to CPU_SECONDS per conversation and to MEMORY_BYTES, macOS only to CPU_SECONDS.
    Windows has no limits.
    """

    def __init__(self) -> None:
        program = "from thinker.data.chat import chat_template; chat_template.serve({})"
        super().__init__(program.format(CPU_SECONDS))

    def render(self, **request: Any) -> list[Rendering]:
        """See render()."""
        reply = self.ask(json.dumps(request))
        if reply is None:
            limits = f"{CPU_SECONDS} s or {MEMORY_BYTES >> 30} GB of memory"
            raise UserError(
                f"the chat template needs more than {limits} for one conversation; fix the template"
            )
        rendered, error = json.loads(reply)
        if error is not None:
            raise UserError(error)
        found = []
        for text, *kinds_of_spans in rendered:
            found.append(Rendering(text, *(list(map(tuple, spans)) for spans in kinds_of_spans)))
        return found

    def close(self) -> None:
        """End the process."""
        _renderer.cache_clear()
        super().close()


_lock = threading.Lock()


@functools.cache
def _renderer() -> Renderer:
    return Renderer()


def render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    cuts: list[Cut],
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    mark_answers: bool = False,
    now: datetime | None = None,
) -> list[Rendering]:
    """Render beginnings of a conversation.

    cuts: of each beginning, the number of its messages, and whether the start of an answer follows
    them. tools, template_kwargs: variables of the template. mark_answers: find the answers that the
    template marks. now: what the template's clock says.

    Raises UserError if the template rejects the conversation, is invalid or exceeds the limits, or
    if transformers is not installed.
    """
    variables = dict(tokenizer.special_tokens_map)
    for name, value in (template_kwargs or {}).items():
        if name in RESERVED or name in tokenizer.special_tokens_map:
            raise UserError(f"chat_template_kwargs cannot set {name}; remove it")
        variables[name] = value
    with _lock:  # so that a new process is started once
        return _renderer().render(
            template=tokenizer.chat_template,
            variables=variables,
            tools=tools,
            messages=messages,
            cuts=cuts,
            mark_answers=mark_answers,
            traced=["tools", *(template_kwargs or {})],
            now=(now or datetime.now()).isoformat(),
        )


def serve(cpu_seconds: int) -> None:
    """Answer requests from standard input until it ends."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # libraries may print
    with contextlib.suppress(ImportError):  # an error that _reply() reports
        _load_libraries()
    for line in sys.stdin:
        limit_next_request(cpu_seconds, MEMORY_BYTES)
        try:
            reply = _reply(**json.loads(line))
        except MemoryError:
            break
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _load_libraries() -> None:
    """Import what renders, and let transformers compile templates in an environment that traces.

    Importing takes seconds on a slow machine, which no conversation's limit should pay.
    """
    import jinja2.sandbox

    from thinker.data.chat.tracing_environment import TracingEnvironment

    jinja2.sandbox.ImmutableSandboxedEnvironment = TracingEnvironment
    import transformers.utils.chat_template_utils  # noqa: F401 - which looks the class up


def _reply(
    template: str,
    variables: dict[str, Any],
    tools: list | None,
    messages: list,
    cuts: list[Cut],
    mark_answers: bool,
    traced: list[str],
    now: str,
) -> tuple[list[Rendering], str | None]:
    """Return what render() returns, and an error message or None."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        from thinker.data.chat.traced_text import joined, origin_spans
        from thinker.data.chat.tracing_environment import TracingEnvironment

        TracingEnvironment.traced = frozenset(traced)
        TracingEnvironment.now = datetime.fromisoformat(now)
        rendered = []
        for n_messages, add_generation_prompt in cuts:
            TracingEnvironment.rendered.clear()
            texts, spans = render_jinja_template(
                [messages[:n_messages]],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=mark_answers,
                **variables,
            )
            text = joined(TracingEnvironment.rendered)
            if text != texts[0]:  # who has written what would stay unknown
                return [], "this version of transformers renders chat templates in another way"
            answers = spans[0] if mark_answers else []
            rendered.append(Rendering(texts[0], answers, origin_spans(text)))
    except ImportError:
        remedy = f"run {install_command('hf')}"
        return [], f"conversations need the transformers package; {remedy}"
    except MemoryError:
        raise
    except Exception as error:  # a template can raise any error
        return [], f"the chat template rejects a conversation: {error or type(error).__name__}"
    if sum(len(each.text) for each in rendered) > MAX_TEXT_CHARS:
        limit = f"{MAX_TEXT_CHARS:,} characters for one conversation"
        return [], f"the chat template renders more than {limit}"
    return rendered, None
