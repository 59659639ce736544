"""Which parts of a conversation its chat template reads.

Whatever a template does not read would be dropped without a word, and the model trained on half a
conversation.
"""

import re
from functools import lru_cache

from thinker.data.text.document import Document
from thinker.runtime.errors import UserError

# Keys of a message that say nothing to the model, or that are read by other names.
HARMLESS = {"role", "content", "weight", "train", "tool_call_id", "id"}
# transformers gives a template these if a message has one of the names of REASONING.
ALIASES = ("reasoning_content", "thinking")
REASONING = (*ALIASES, "reasoning")


def mentions(template: str, name: str) -> bool:
    """Whether a template has a word, outside of comments."""
    return name in _words(template)


@lru_cache
def _words(template: str) -> frozenset[str]:
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return frozenset(re.findall(r"\w+", code))


def check_variables(template: str | None, document: Document) -> None:
    """Raise UserError if a conversation has something that the template does not read."""
    if template is None:
        return  # that is an error of its own
    if document.tools and not mentions(template, "tools"):
        raise UserError(f"{document.where} has tools, which the chat template ignores")
    for name in document.template_kwargs:
        if not mentions(template, name):
            raise UserError(
                f"{document.where}: chat_template_kwargs has {name}, which the chat template "
                "ignores"
            )
    for message in document.messages:
        _check_message(template, message, document.where)


def _check_message(template: str, message: dict, where: str) -> None:
    if "tool_calls" in message and not mentions(template, "tool_calls"):
        only = "" if message.get("content") else "only "
        raise UserError(f"{where}: a message has {only}tool_calls, which the chat template ignores")
    for key in message.keys() - HARMLESS:
        # Templates tell the tool of an answer from the call before it.
        if key == "name" and message["role"] == "tool":
            continue
        names = (key,)
        if key in REASONING:
            names = (key, *ALIASES)
        if not any(mentions(template, name) for name in names):
            raise UserError(f"{where}: a message has {key}, which the chat template ignores")
