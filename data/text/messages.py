"""Conversations in table rows: three ways to write them, and the validation of their messages."""

from typing import Any

from thinker.runtime.errors import UserError, did_you_mean

JSON = (str, int, float, bool, list, dict, type(None))
Message = dict[str, Any]  # {"role": "user", "content": "..."}; the template defines the roles

PAIR = "prompt and completion"  # two columns that together are a conversation
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}


def find_column(row: dict[str, Any]) -> str:
    """The column with the text or conversation of a row: text, messages or conversations; or PAIR; else text."""
    names = [name for name in ("text", "messages", "conversations") if name in row]
    return [*names, PAIR if {"prompt", "completion"} <= row.keys() else "text"][0]


def join_pair(row: dict[str, Any], where: str) -> list[Any]:
    """The messages of a row whose prompt and completion are texts or lists of messages. Raises UserError."""
    messages = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(column)
        if not isinstance(value, str | list):
            raise UserError(
                f"{where}: {column} is {type(value).__name__}; it must be text or a list of messages"
            )
        messages += [{"role": role, "content": value}] if isinstance(value, str) else value
    return messages


def check_messages(value: list, where: str) -> list[Message]:
    """Return the messages of a table row without null values. Raises UserError with the row if they are invalid.

    Messages of ShareGPT, {"from": "human", "value": ...}, are converted.
    """
    if value and all(
        isinstance(message, dict) and {"from", "value"} <= message.keys() for message in value
    ):
        value = [
            {"role": SHAREGPT_ROLES.get(str(m["from"]), m["from"]), "content": m["value"]}
            for m in value
        ]
    if not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        raise UserError(
            f'{where} is not a conversation; use a list of {{"role": ..., "content": ...}}'
        )
    for part in (part for message in value for part in message.values()):
        if not isinstance(part, JSON):  # the datasets library turns some strings into dates
            raise UserError(
                f"{where}: {part!r} was parsed as a {type(part).__name__}; write all messages as text"
            )
    messages = [
        {key: part for key, part in message.items() if part is not None} for message in value
    ]
    for message in messages:
        if not message.keys() & {"content", "tool_calls"}:  # a template would treat it as empty
            hint = did_you_mean("content", message.keys() - {"role"}, "content instead of {}")
            raise UserError(f"{where}: a message has no content, only {', '.join(message)}{hint}")
        if not isinstance(
            message.get("content", ""), str
        ):  # most templates would print its Python repr
            kind = type(message["content"]).__name__
            raise UserError(f"{where}: the content of a message is a {kind}; it must be text")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no answer; add a message with the role assistant")
    return messages
