"""How a model writes a call of a tool, read from what its chat template writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from thinker.data.chat import chat
from thinker.data.chat.literal_names import special_names
from thinker.data.chat.template_variables import mentions
from thinker.data.text.document import Message
from thinker.data.tokenizers.tokenizer import Tokenizer, any_name
from thinker.runtime.errors import UserError

# A call, and an answer that has nothing in common with one at its start and its end.
NAME = "look_up_7"
ARGUMENTS = {"key_7": "value_7"}
SAID = "\xa7"
QUESTION: Message = {"role": "user", "content": "Hi"}
FUNCTION = {"name": NAME, "arguments": ARGUMENTS}
CALL = {"id": "abcdefgh7", "type": "function", "function": FUNCTION}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key_7": {"type": "string"}}},
    },
}
KEYS = {"name", "arguments", "parameters", "id", "type"}  # of the JSON of a call


@dataclass(frozen=True)
class CallFormat:
    """A call is its opening, a JSON object or a list of them, and its closing.

    Without an opening, the JSON is the whole answer.
    """

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    before_json: str = ""  # whitespace behind the opening
    before_closing: str = ""  # whitespace behind the JSON
    keys: tuple[str, ...] = ("name", "arguments")  # of the object
    hidden: tuple[str, ...] = ()  # names of special tokens in the opening and the closing


def find_call_format(tokenizer: Tokenizer) -> CallFormat:
    """How the chat template of a tokenizer writes calls; the default if it does not show that."""
    template = tokenizer.chat_template
    if template is None or not mentions(template, "tool_calls"):
        return CallFormat()
    called: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    said: Message = {"role": "assistant", "content": SAID}
    try:
        with_call = chat.render(tokenizer, [QUESTION, called], tools=[TOOL])
        with_text = chat.render(tokenizer, [QUESTION, said], tools=[TOOL])
    except UserError:  # the template wants another conversation
        return CallFormat()
    return _format(tokenizer, with_call, with_text)


def _format(tokenizer: Tokenizer, with_call: str, with_text: str) -> CallFormat:
    """The format of the call in a rendered conversation, which is otherwise like another one."""
    names = [match.span() for match in any_name(tokenizer.special_tokens).finditer(with_call)]
    start = _n_common(with_call, with_text)
    end = len(with_call) - _n_common(with_call[::-1], with_text[::-1])
    # The name of a token is a unit, even if it begins or ends like another.
    for first, last in names:
        if first < start < last:
            start = first
        if first < end < last:
            end = last
    json_start, json_end, keys = _find_json(with_call, start, end)
    if not keys:
        return CallFormat()
    before = with_call[start:json_start].lstrip()
    after = _until_eos(tokenizer, with_call[json_end:end]).rstrip()
    opening = before.rstrip()
    closing = after.lstrip()
    if not opening:  # then the JSON is the whole answer
        closing = ""
        after = ""
    hidden = [name for name in special_names(tokenizer) if name in opening + closing]
    return CallFormat(
        opening,
        closing,
        before[len(opening) :],
        after[: len(after) - len(closing)],
        keys,
        tuple(hidden),
    )


def _n_common(a: str, b: str) -> int:
    """The number of equal characters at the start of two texts."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _find_json(text: str, start: int, end: int) -> tuple[int, int, tuple[str, ...]]:
    """Where the JSON of the call starts and ends, and its keys; no keys if it is not found."""
    decoder = json.JSONDecoder()
    for position in range(start, text.rfind(NAME)):
        if text[position] not in "{[":
            continue
        try:
            value, json_end = decoder.raw_decode(text, position)
        except ValueError:
            continue
        keys = _keys(value)
        if keys and json_end <= end:
            return position, json_end, keys
    return 0, 0, ()


def _keys(value: Any) -> tuple[str, ...]:
    """The keys of a call; none if the value is something else."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict) or not value.keys() <= KEYS or value.get("name") != NAME:
        return ()
    if value.get("arguments", value.get("parameters")) != ARGUMENTS:
        return ()
    return tuple(value)


def _until_eos(tokenizer: Tokenizer, text: str) -> str:
    """A text up to the first token that ends texts."""
    for name, number in tokenizer.special_tokens.items():
        if number in tokenizer.eos_ids:
            text = text.partition(name)[0]
    return text
