"""How calls of tools are found in the text of an answer."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinker.serving.calls.call_constraint import MAX_HELD
from thinker.serving.calls.call_format import CallFormat

Delta = dict[str, Any]  # of a message: {"content": ...} or {"tool_calls": [...]}

MAX_CALL_CHARS = 1 << 15  # of a call that need not come; a longer text is no call
ID_CHARS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the templates of Mistral accept no other
# Up to the arguments of a call that follows call_schema().
BEFORE_ARGUMENTS = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"]*")\s*,\s*"arguments"\s*:\s*')


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
    """Finds calls in the text of an answer that may have some, piece by piece.

    A call is {"name": ..., "arguments": {...}} (or "parameters") with the name of a tool; a list of
    them is also several calls. Calls stand between the marks of a CallFormat, or they are the whole
    answer. Other text is content, and so are calls that do not fit.
    """

    def __init__(
        self,
        names: list[str],
        max_calls: int | None,
        call_format: CallFormat,
        fits: Callable[[str], bool],
    ) -> None:
        """`max_calls`: further ones are dropped; None: no limit. `fits`: checks the JSON of a call,
        with the name first."""
        self.n_calls = 0
        self._names = names
        self._max_calls = max_calls
        self._format = call_format
        self._fits = fits
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
        """End the text, complete or not. Yields the rest of it."""
        text = self._text
        self._text = ""
        calls = None
        if self._find in (self._in_json, self._in_marks):
            calls = self._read_calls(text.removeprefix(self._format.opening))
        if calls is not None:
            yield from self._call(calls)
        elif not self.n_calls or text.strip():
            yield from self._content(text)

    def _at_start(self) -> Iterator[Delta]:
        begin = self._text[: MAX_HELD + 1].lstrip()
        if begin[:1] == "{" or re.match(r"\[\s*\{", begin):
            self._find = self._in_json
        elif re.fullmatch(r"\[\s*", begin) and len(self._text) <= MAX_HELD:
            return iter(())  # perhaps a list of calls
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
        opening = self._format.opening
        before = self._text
        if opening and opening in before:
            before = before.partition(opening)[0]
            self._text = self._text[len(before) :]
            self._find = self._in_marks
        else:
            before = before[: len(before) - _n_begun(before, opening)]
            if self._is_blank(before):
                return
            self._text = self._text[len(before) :]
        if not self._is_blank(before):
            yield from self._content(before)

    def _is_blank(self, text: str) -> bool:
        """Whether a text is whitespace that is no content if a call follows."""
        return not (self._has_content or text.strip() or len(text) > MAX_HELD)

    def _in_marks(self) -> Iterator[Delta]:
        body, is_closed, rest = self._split_marked()
        if len(body) > MAX_CALL_CHARS:
            self._find = self._in_plain_text
            return
        if not is_closed:
            return
        calls = self._read_calls(body)
        self._text = rest
        self._find = self._in_content
        if calls is None:
            yield from self._content(self._format.opening + body + self._format.closing)
        else:
            yield from self._call(calls)

    def _split_marked(self) -> tuple[str, bool, str]:
        """What follows an opening, whether it is closed, and what comes then."""
        body = self._text.removeprefix(self._format.opening)
        if self._format.closing:
            body, closing, rest = body.partition(self._format.closing)
            return body, bool(closing), rest
        # Without a closing, the end of the JSON is that of the call.
        begin = body.lstrip()
        if begin and begin[0] not in "{[":
            return "", True, body
        try:
            _, end = DECODER.raw_decode(begin)
        except (ValueError, RecursionError):
            return body, False, ""
        return begin[:end], True, begin[end:]

    def _content(self, text: str) -> Iterator[Delta]:
        for name in self._format.hidden:  # other special tokens have no text either
            text = text.replace(name, "")
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
            if not isinstance(value, list):
                value = [value]
            for one in value:
                call = self._read_call(one)
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
        name = value["name"]
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            is_fitting = self._fits(f'{{"name": {json.dumps(name)}, "arguments": {text}}}')
        except ValueError:  # a number beyond all, or half a character
            return None
        return (name, text) if is_fitting else None


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
