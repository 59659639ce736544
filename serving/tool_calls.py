"""Calls of tools: the schema of a call, and how calls are found in the text of an answer."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator
from typing import Any

Delta = dict[str, Any]  # of a message: {"content": ...} or {"tool_calls": [...]}

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_CALL_CHARS = 1 << 15  # of a call that the model makes freely; a longer text is no call
MAX_HELD = 64  # characters of whitespace that wait for what follows them
ID_CHARS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the templates of Mistral accept no other
# Up to the arguments of a call that follows call_schema().
BEFORE_ARGUMENTS = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"]*")\s*,\s*"arguments"\s*:\s*')


def call_schema(parameters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of {"name": ..., "arguments": {...}}, a call of one of these tools.

    `parameters`: the schema of the arguments, by the name of the tool.
    """
    calls = []
    for name in parameters:
        properties = {"name": {"const": name}, "arguments": {"$ref": _pointer(name)}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return any_of(calls, parameters)


def any_of(choices: list[dict[str, Any]], definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The schema of any of the choices, which refer to the definitions by their _pointer()."""
    moved = {name: _with_moved_root(schema, name) for name, schema in definitions.items()}
    if len(choices) == 1:
        return {**choices[0], "$defs": moved}
    return {"anyOf": choices, "$defs": moved}


def call_or_answer_schema(
    parameters: dict[str, dict[str, Any]], answer: dict[str, Any]
) -> dict[str, Any]:
    """The schema of a call of a tool, or of an answer with a schema of its own."""
    name = "!answer"  # which is no name of a tool
    calls = call_schema(parameters)
    choices = calls.get("anyOf", [{key: calls[key] for key in calls if key != "$defs"}])
    return any_of([*choices, {"$ref": _pointer(name)}], {**parameters, name: answer})


def _pointer(name: str) -> str:
    return f"#/$defs/{name}"


def _with_moved_root(schema: Any, name: str) -> Any:
    """A schema whose references from its root still hold when it is a definition."""
    if isinstance(schema, list):
        return [_with_moved_root(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in ("const", "enum", "default", "examples"):  # data
            moved[key] = value
        elif key in ("properties", "patternProperties", "$defs", "definitions"):
            # Their keys are names of the user, not keywords.
            moved[key] = value
            if isinstance(value, dict):
                moved[key] = {inner: _with_moved_root(value[inner], name) for inner in value}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = _pointer(name) + value[1:]
        else:
            moved[key] = _with_moved_root(value, name)
    return moved


class ForcedCall:
    """Reads the text of an answer that call_schema() constrains, piece by piece."""

    def __init__(self) -> None:
        self.n_calls = 0
        self._text = ""  # that has not been given to the client
        self._has_arguments = False

    def feed(self, text: str) -> Iterator[Delta]:
        """Add text. Yields what is certain."""
        self._text += text
        if not self.n_calls:
            match = BEFORE_ARGUMENTS.match(self._text)
            if match is None:
                return
            self._text = self._text[match.end() :]
            self.n_calls = 1
            yield new_call(0, json.loads(match[1]), "")
        # The last brace may be the one that closes the call, after the arguments.
        certain = self._text.rstrip()
        certain = certain.removesuffix("}").rstrip()
        # Between tokens of JSON, a constrained text has less whitespace than that.
        n_certain = max(len(certain), len(self._text) - MAX_HELD)
        yield from self._arguments(self._text[:n_certain])

    def finish(self, is_complete: bool) -> Iterator[Delta]:
        """End the text. Yields the rest of it, if the call was cut."""
        if is_complete:
            return
        if self.n_calls:
            yield from self._arguments(self._text)
        elif self._text:
            yield {"content": self._text}

    def _arguments(self, text: str) -> Iterator[Delta]:
        self._text = self._text[len(text) :]
        if not self._has_arguments:
            text = text.lstrip()
        if text:
            self._has_arguments = True
            yield {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


class FreeCalls:
    """Finds calls in the text of an answer that nothing constrains, piece by piece.

    A call is {"name": ..., "arguments": {...}} (or "parameters") with the name of a tool. Calls are
    between <tool_call> and </tool_call>, or they are the whole answer. Other text is content.
    """

    def __init__(self, names: list[str], max_calls: int | None) -> None:
        """`max_calls`: further ones are dropped; None: no limit."""
        self.n_calls = 0
        self._names = names
        self._max_calls = max_calls
        self._text = ""  # that has not been given to the client
        self._find = self._at_start  # in what comes next
        self._has_content = False  # since the last call

    def feed(self, text: str) -> Iterator[Delta]:
        """Add text. Yields what is certain."""
        self._text += text
        find = None
        while find != self._find:
            find = self._find
            yield from find()

    def finish(self, is_complete: bool) -> Iterator[Delta]:
        """End the text. Yields the rest of it."""
        text = self._text
        self._text = ""
        is_whole_answer = self._find == self._in_json
        calls = None
        if is_whole_answer:
            calls = self._read_calls(text)
        elif self._find == self._in_tags:
            calls = self._read_calls(text.removeprefix(OPENING))
        if calls is not None:
            yield from self._call(calls)
        elif not self.n_calls or text.strip():
            yield from self._content(text)

    def _at_start(self) -> Iterator[Delta]:
        begin = self._text[: MAX_HELD + 1].lstrip()[:1]
        if begin == "{":
            self._find = self._in_json
        elif begin or len(self._text) > MAX_HELD:
            self._find = self._in_content
        return iter(())

    def _in_json(self) -> Iterator[Delta]:
        """What begins like a call is one only if nothing follows it."""
        if len(self._text) > MAX_CALL_CHARS:
            self._find = self._in_plain_text
        return iter(())

    def _in_plain_text(self) -> Iterator[Delta]:
        yield from self._content(self._text)
        self._text = ""

    def _in_content(self) -> Iterator[Delta]:
        before, opening, _ = self._text.partition(OPENING)
        if opening:
            self._text = self._text[len(before) :]
            self._find = self._in_tags
        else:
            before = before[: len(before) - _n_begun(before, OPENING)]
            if self._is_blank(before):
                return
            self._text = self._text[len(before) :]
        if not self._is_blank(before):
            yield from self._content(before)

    def _is_blank(self, text: str) -> bool:
        """Whether a text is whitespace that is no content if a call follows."""
        return not (self._has_content or text.strip() or len(text) > MAX_HELD)

    def _in_tags(self) -> Iterator[Delta]:
        body, closing, rest = self._text.removeprefix(OPENING).partition(CLOSING)
        if len(body) > MAX_CALL_CHARS:
            self._find = self._in_plain_text
            return
        if not closing:
            return
        calls = self._read_calls(body)
        self._text = rest
        self._find = self._in_content
        if calls is None:
            yield from self._content(OPENING + body + CLOSING)
        else:
            yield from self._call(calls)

    def _content(self, text: str) -> Iterator[Delta]:
        if text:
            self._has_content = True
            yield {"content": text}

    def _call(self, calls: list[tuple[str, str]]) -> Iterator[Delta]:
        self._has_content = False
        for name, arguments in calls:
            if self.n_calls != self._max_calls:
                yield new_call(self.n_calls, name, arguments)
                self.n_calls += 1

    def _read_calls(self, text: str) -> list[tuple[str, str]] | None:
        """The name and the arguments (JSON) of each call; None if the text is anything else."""
        calls = []
        text = text.strip()
        while text:
            try:
                value, end = DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = self._read_call(value)
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip()
        return calls or None

    def _read_call(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, dict):
            return None
        return value["name"], json.dumps(arguments, ensure_ascii=False)


def new_call(index: int, name: str, arguments: str) -> Delta:
    """The delta that begins a call, with as much of its arguments as is known."""
    identity = "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH))
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": identity, "type": "function", "function": function}
    return {"tool_calls": [call]}


def join(deltas: Iterable[Delta]) -> Delta:
    """The content and the calls of a whole message."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] < len(calls):
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            else:
                calls.append({key: part[key] for key in part if key != "index"})
    message: Delta = {"content": content}
    if calls:
        message = {"content": content or None, "tool_calls": calls}
    return message


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _n_begun(text: str, tag: str) -> int:
    """The length of the longest end of a text that begins a tag."""
    for n in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-n:]):
            return n
    return 0
