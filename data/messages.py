"""Validation of the messages of a conversation."""

from typing import Any

from thinker.runtime.errors import UserError, did_you_mean

JSON = (str, int, float, bool, list, dict, type(None))
Message = dict[str, Any]  # {"role": "user", "content": "..."}; the template defines the roles


def check_messages(value: list, where: str) -> list[Message]:
    """Return the messages of a table row without null values. Raises UserError with the row if they are invalid."""
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value):
        raise UserError(f'{where} is not a conversation; use a list of {{"role": ..., "content": ...}}')
    for part in (part for message in value for part in message.values()):
        if not isinstance(part, JSON):  # the datasets library turns some strings into dates
            raise UserError(f"{where}: {part!r} was parsed as a {type(part).__name__}; write all messages as text")
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    for message in messages:
        if not message.keys() & {"content", "tool_calls"}:  # a template would treat it as empty
            hint = did_you_mean("content", message.keys() - {"role"}, "content instead of {}")
            raise UserError(f"{where}: a message has no content, only {', '.join(message)}{hint}")
        if not isinstance(message.get("content", ""), str):  # most templates would print its Python repr
            kind = type(message["content"]).__name__
            raise UserError(f"{where}: the content of a message is a {kind}; it must be text")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no answer; add a message with the role assistant")
    return messages
