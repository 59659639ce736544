"""Conversations in table rows: three ways to write them, and the validation of their messages."""

from typing import Any

from thinker.data.text.document import Message
from thinker.runtime.errors import UserError, did_you_mean

JSON = (str, int, float, bool, list, dict, type(None))

PAIR = "prompt and completion"  # two columns that together are a conversation
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}


def find_column(row: dict[str, Any]) -> str:
    """The column with the text or conversation of a row, or PAIR. Text if there is none."""
    for name in ("text", "messages", "conversations"):
        if name in row:
            return name
    if {"prompt", "completion"} <= row.keys():
        return PAIR
    return "text"


def join_pair(row: dict[str, Any], where: str) -> list[Any]:
    """The messages of a row whose prompt and completion are texts or lists of messages.

    Raises UserError.
    """
    messages = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(column)
        if isinstance(value, str):
            messages.append({"role": role, "content": value})
        elif isinstance(value, list):
            messages += value
        else:
            kind = type(value).__name__
            raise UserError(f"{where}: {column} is {kind}; it must be text or a list of messages")
    return messages


def check_messages(value: list, where: str) -> list[Message]:
    """Return the messages of a table row without null values.

    Messages of ShareGPT, {"from": "human", "value": ...}, are converted. Raises UserError with the
    row if they are invalid.
    """
    if value and all(map(_is_of_sharegpt, value)):
        value = [_from_sharegpt(message) for message in value]
    if not all(map(_has_role, value)):
        raise UserError(
            f'{where} is not a conversation; use a list of {{"role": ..., "content": ...}}'
        )
    messages = [_without_nulls(message, where) for message in value]
    for message in messages:
        _check_content(message, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no answer; add a message with the role assistant")
    return messages


def _is_of_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys()


def _from_sharegpt(message: dict[str, Any]) -> Message:
    role = message["from"]
    return {"role": SHAREGPT_ROLES.get(str(role), role), "content": message["value"]}


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _without_nulls(message: Message, where: str) -> Message:
    """The message without nulls, which tables have for keys of other messages."""
    kept = {}
    for key, part in message.items():
        if not isinstance(part, JSON):  # the datasets library turns some strings into dates
            kind = type(part).__name__
            raise UserError(f"{where}: {part!r} was parsed as a {kind}; write all messages as text")
        if part is not None:
            kept[key] = part
    return kept


def _check_content(message: Message, where: str) -> None:
    """Raise UserError if a template would treat a message as empty, or print its Python repr."""
    if not message.keys() & {"content", "tool_calls"}:
        hint = did_you_mean("content", message.keys() - {"role"}, "content instead of {}")
        raise UserError(f"{where}: a message has no content, only {', '.join(message)}{hint}")
    content = message.get("content", "")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise UserError(f"{where}: the content of a message is a {kind}; it must be text")
