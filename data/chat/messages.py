"""Conversations in table rows: three ways to write them, what may stand beside them, and the
validation of their messages."""

import json
import sys
from functools import lru_cache
from typing import Any

from thinker.data.text.document import Message
from thinker.runtime.errors import UserError, did_you_mean, misspelled
from thinker.runtime.process.progress import Progress

JSON = (str, int, float, bool, list, dict, type(None))

PAIR = "prompt and completion"  # two columns that together are a conversation
MAX_DEPTH = 100  # of lists and objects within each other
BESIDE = ("system", "tools", "chat_template_kwargs")  # columns that belong to a conversation
# Columns that would change a conversation, and that are not supported.
REFUSED = {
    "chosen",
    "documents",
    "functions",
    "images",
    "audios",
    "rejected",
    "system_message",
    "system_prompt",
    "tool_choice",
    "train",
    "videos",
    "weight",
}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}


# Pairs of columns that other programs read as a question and its answer.
OTHER_PAIRS = (
    ("instruction", "output"),
    ("prompt", "response"),
    ("question", "answer"),
    ("input", "output"),
)


def find_column(row: dict[str, Any]) -> str:
    """The column with the text or conversation of a row, or PAIR. Text if there is none."""
    for name in ("text", "messages", "conversations"):
        if name in row:
            return name
    if {"prompt", "completion"} <= row.keys():
        return PAIR
    return "text"


def hint_of_form(row: dict[str, Any], column: str) -> str:
    """End of a message about a row without a column: what was meant, or ""."""
    if {"role", "content"} <= row.keys():
        example = '{"messages": [{"role": ..., "content": ...}, ...]}'
        return f"; write each conversation as {example}"
    if column in ("messages", "conversations"):
        return misspelled(row, [column])
    if column != "text":
        return ""
    # No column of a conversation was found either.
    hint = misspelled(row, ["messages", "conversations", "prompt", "completion"])
    if hint:
        return hint
    for question, answer in OTHER_PAIRS:
        if {question, answer} <= row.keys():
            append = ""
            if question == "instruction" and "input" in row:
                append = "append input to instruction, and "
            return (
                f"; for conversations, {append}rename {question} and {answer} to prompt and "
                "completion"
            )
    return ""


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


def read_beside(
    row: dict[str, Any], column: str, messages: list[Message], where: str
) -> tuple[list[Message], list[Any] | None, dict[str, Any]]:
    """What stands in a row beside a conversation.

    Returns the messages with the system text in the column `system`, the tools, and the variables
    in chat_template_kwargs. Raises UserError for columns that would change the conversation, and
    that are not supported.
    """
    refused = sorted(REFUSED.intersection(_other_columns(row, column)))
    if refused:
        hint = ""
        if set(refused) & {"weight", "train"}:
            hint = "; write them in the messages"
        raise UserError(f"{where}: the column {refused[0]} is not supported{hint}")

    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(f"{where}: system is {type(system).__name__}; it must be text")
    if system:
        if messages[0]["role"] == "system":
            raise UserError(f"{where} has a system message and the column system; remove one")
        messages = [{"role": "system", "content": system}, *messages]

    tools = _parsed(row, "tools", list, where)
    variables = _parsed(row, "chat_template_kwargs", dict, where) or {}
    variables = {name: value for name, value in variables.items() if value is not None}
    return messages, tools or None, variables


def describe_unread(row: dict[str, Any], column: str, where: str) -> str:
    """Say which columns of a row with a conversation are not read, or "". Prints it, too."""
    columns = _other_columns(row, column)
    if not columns:
        return ""
    return _say_unread(where.rpartition(" of ")[2], tuple(columns))


def _other_columns(row: dict[str, Any], column: str) -> list[str]:
    """The columns of a row with values that are no part of its conversation."""
    used = {"prompt", "completion"} if column == PAIR else {column}
    return sorted(key for key in row.keys() - used - {*BESIDE} if row[key] is not None)


def _parsed(row: dict[str, Any], column: str, kind: type, where: str) -> Any:
    """The value of a column, which may be written as JSON text. Raises UserError."""
    value = row.get(column)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: {column} is not valid JSON: {error}") from error
    if value in (None, ""):
        return None
    if not isinstance(value, kind):
        name = "a list" if kind is list else "an object"
        raise UserError(f"{where}: {column} is {type(value).__name__}; it must be {name}")
    _check_json(value, where)
    return value


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A JSON value without nulls in objects, which Parquet has for keys of other rows."""
    if depth > MAX_DEPTH:  # an error that _check_json() reports
        return value
    if isinstance(value, list):
        return [without_nulls(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if item is not None:
            kept[key] = without_nulls(item, depth + 1)
    return kept


@lru_cache(100)  # once for each file
def _say_unread(where: str, columns: tuple[str, ...]) -> str:
    line = f"{where}: not read: {', '.join(columns)}"
    for column in columns:
        line += misspelled([column], BESIDE)
    Progress.write(line, file=sys.stderr)  # a bar may be shown
    return line


def check_messages(value: list, where: str) -> list[Message]:
    """The messages of a conversation in a table row, as check_roles(). Raises UserError if none of
    them is an answer."""
    messages = check_roles(value, where)
    if not any(message["role"] == "assistant" for message in messages):
        roles = list(dict.fromkeys(message["role"] for message in messages))
        if hint := misspelled(roles, ["assistant"]):
            raise UserError(f"{where} has no answer, only the roles {' and '.join(roles)}{hint}")
        raise UserError(f"{where} has no answer; add a message with the role assistant")
    return messages


def check_roles(value: list, where: str) -> list[Message]:
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
        _check_weight(message, where)
    return messages


def _is_of_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys()


def _from_sharegpt(message: dict[str, Any]) -> Message:
    others = dict(message)
    role = others.pop("from")
    content = others.pop("value")
    return {"role": SHAREGPT_ROLES.get(str(role), role), "content": content, **others}


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _without_nulls(message: Message, where: str) -> Message:
    """The message without nulls, which tables have for keys of other messages."""
    kept = {}
    for key, part in message.items():
        _check_json(part, where)
        if part is not None:
            kept[key] = part
    return kept


def _check_json(value: Any, where: str, depth: int = 0) -> None:
    """Raise UserError if a value, or one within it, is none of JSON, or lies too deep."""
    if not isinstance(value, JSON):  # the datasets library turns some strings into dates
        kind = type(value).__name__
        raise UserError(f"{where}: {value!r} was parsed as a {kind}; write all messages as text")
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: an object is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for item in value:
            _check_json(item, where, depth + 1)
    if isinstance(value, dict):
        for item in value.values():
            _check_json(item, where, depth + 1)


def _check_content(message: Message, where: str) -> None:
    """Raise UserError if a template would treat a message as empty, or print its Python repr."""
    if not message.keys() & {"content", "tool_calls"}:
        hint = did_you_mean("content", message.keys() - {"role"}, "content instead of {}")
        raise UserError(f"{where}: a message has no content, only {', '.join(message)}{hint}")
    content = message.get("content", "")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise UserError(f"{where}: the content of a message is a {kind}; it must be text")


def _check_weight(message: Message, where: str) -> None:
    """Raise UserError if a message asks for another weight in the loss than 0 or 1, or if one that
    is not an answer asks to be trained."""
    weight = message.get("weight", 1)
    train = message.get("train", True)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UserError(f"{where}: the weight of a message is {weight!r}; use 0 or 1")
    if not isinstance(train, bool):
        raise UserError(f"{where}: train of a message is {train!r}; use true or false")
    asks = message.get("weight") == 1 or message.get("train") is True
    if asks and message["role"] != "assistant":
        raise UserError(
            f"{where}: a message of the role {message['role']} asks to be trained; only answers are"
        )
