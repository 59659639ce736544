"""Texts that know which of their characters come from a message.

A chat template may split, cut, join and replace what users write. Its result alone does not say
whether a `<|im_end|>` in it ends a turn or was written by a user.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

# Where a character comes from. The numbers from MESSAGE on are those of the messages.
TEMPLATE, UNCLEAR, VARIABLE, MESSAGE = range(4)

# The methods whose result has a character for each character, unless it has another length.
CHANGE_CASE = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
# The methods whose result is UNCLEAR.
NOT_TRACED = (
    "center",
    "expandtabs",
    "format",
    "format_map",
    "ljust",
    "rjust",
    "translate",
    "zfill",
)


class TracedText(str):
    """A text with the origin of each character, which the methods of texts keep."""

    __slots__ = ("_origins",)  # with an underscore, as templates must not see it

    def __new__(cls, text: str = "", origins: str | None = None) -> "TracedText":
        """origins: chr() of the origin of each character; None: UNCLEAR."""
        traced = super().__new__(cls, text)
        if origins is None:
            origins = chr(UNCLEAR) * len(traced)
        traced._origins = origins
        return traced

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self)):
            yield self[number : number + 1]

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return TracedText(super().__getitem__(key), self._origins[key])

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return joined([self, other])

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return joined([other, self])

    def __mod__(self, values: Any) -> str:
        return TracedText(super().__mod__(values))

    def __rmod__(self, text: str) -> str:
        return TracedText(plain(text) % plain(self))

    def __mul__(self, count: SupportsIndex) -> str:
        return TracedText(super().__mul__(count), self._origins * count)

    __rmul__ = __mul__

    def join(self, texts: Iterable[str]) -> str:
        """As str.join()."""
        parts = []
        for text in texts:
            parts += [self, text]
        return joined(parts[1:])

    def replace(self, old: str, new: str, count: int = -1) -> str:
        """As str.replace()."""
        if old == "":
            return TracedText(super().replace(old, new, count))
        return traced(new).join(self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        """As str.split()."""
        return self._pieces(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        """As str.rsplit()."""
        return self._pieces(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As str.splitlines()."""
        return self._pieces(super().splitlines(keepends), 0)

    def partition(self, sep: str) -> tuple[str, str, str]:
        """As str.partition()."""
        return tuple(self._pieces(super().partition(sep), 0))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """As str.rpartition()."""
        return tuple(self._pieces(super().rpartition(sep), 0))

    def strip(self, chars: str | None = None) -> str:
        """As str.strip()."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        """As str.lstrip()."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        """As str.rstrip()."""
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> str:
        """As str.removeprefix()."""
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        """As str.removesuffix()."""
        return self[: len(super().removesuffix(suffix))]

    def _pieces(self, pieces: Iterable[str], n_between: int) -> list[str]:
        """Pieces of this text in order.

        n_between: the number of characters between them; 0: none, or as many as do not begin the
        next piece.
        """
        found = []
        position = 0
        for piece in pieces:
            start = self.index(piece, position)
            position = start + len(piece)
            found.append(self[start:position])
            position += n_between
        return found


def _define(name: str, keeps_length: bool) -> None:
    of_text = getattr(str, name)

    def method(self: TracedText, *args: Any, **kwargs: Any) -> str:
        result = of_text(self, *args, **kwargs)
        if keeps_length and len(result) == len(self):
            return TracedText(result, self._origins)
        return TracedText(result)

    method.__name__ = name
    setattr(TracedText, name, method)


for _name in CHANGE_CASE:
    _define(_name, keeps_length=True)
for _name in NOT_TRACED:
    _define(_name, keeps_length=False)


def origins_of(text: str) -> str:
    """chr() of the origin of each character."""
    if isinstance(text, TracedText):
        return text._origins
    return chr(TEMPLATE) * len(text)


def traced(text: str) -> TracedText:
    """A text with origins; those of a plain text are the template."""
    return TracedText(text, origins_of(text))


def joined(texts: Iterable[str]) -> str:
    """Texts behind each other."""
    texts = list(texts)
    text = "".join(texts)
    if not any(isinstance(part, TracedText) for part in texts):
        return text
    return TracedText(text, "".join(map(origins_of, texts)))


def origin_spans(text: str) -> list[tuple[int, int, int]]:
    """The parts of a text that are not the template's, in order: start, end and origin."""
    found = []
    for match in re.finditer(r"([^\0])\1*", origins_of(text)):
        found.append((*match.span(), ord(match[1])))
    return found


def with_origin(value: Any, origin: int) -> Any:
    """A JSON value whose texts, those of keys included, have an origin."""
    if isinstance(value, str):
        return TracedText(value, chr(origin) * len(value))
    if isinstance(value, list | tuple):
        return [with_origin(item, origin) for item in value]
    if isinstance(value, dict):
        return {with_origin(key, origin): with_origin(item, origin) for key, item in value.items()}
    return value


def from_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose texts are traced, but not their own keys and roles: templates read them, and
    write names of special tokens with roles."""
    found = []
    for number, message in enumerate(messages):
        texts = {}
        for key, item in message.items():
            texts[key] = item if key == "role" else with_origin(item, MESSAGE + number)
        found.append(texts)
    return found


def holds_traced(value: Any) -> bool:
    """Whether a value is a text with origins, or has one within it, or bytes, which have none."""
    if isinstance(value, dict):
        return any(holds_traced(key) or holds_traced(item) for key, item in value.items())
    if isinstance(value, list | tuple | set):
        return any(holds_traced(item) for item in value)
    return isinstance(value, TracedText | bytes)


def plain(text: str) -> str:
    """The text without origins."""
    return str.__str__(text)


def call(function: Callable[[Any], Any], value: Any, is_quoted: bool = False) -> Any:
    """function(value); if that is a text, with the origins of the texts in the value.

    They are found by calling the function with marks instead of these texts. What it changes within
    a text is UNCLEAR. is_quoted: the function writes texts in quotes, with escapes.
    """
    result = function(value)
    if not isinstance(result, str) or not holds_traced(value):
        return result
    result = plain(result)
    hidden: list[TracedText] = []
    with_marks = plain(function(_with_marks(value, hidden)))
    quotes = "['\"]" if is_quoted else ""
    parts = []
    position = 0
    for match in re.finditer(f"{quotes}{_MARK}([0-9]+){_MARK}{quotes}", with_marks):
        parts.append(with_marks[position : match.start()])
        text = hidden[int(match[1])]
        if is_quoted:
            text = _quoted(text, function)
        parts.append(text)
        position = match.end()
    parts.append(with_marks[position:])
    found = joined(parts)
    if found != result:
        return TracedText(result)
    return found


_MARK = secrets.token_hex(16)  # no text contains it


def _with_marks(value: Any, hidden: list[TracedText]) -> Any:
    """The value with marks instead of traced texts, which are added to a list."""
    if isinstance(value, TracedText):
        hidden.append(value)
        return f"{_MARK}{len(hidden) - 1}{_MARK}"
    if isinstance(value, bytes):  # without origins
        return _MARK
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            found[_with_marks(key, hidden)] = _with_marks(item, hidden)
        return found
    if isinstance(value, list):
        return [_with_marks(item, hidden) for item in value]
    if isinstance(value, tuple):
        return tuple(_with_marks(item, hidden) for item in value)
    return value


def _quoted(text: TracedText, write: Callable[[Any], str]) -> str:
    """A text as write() quotes it. Escaped characters become longer."""
    quoted = write(plain(text))
    n_inside = len(quoted) - 2
    origins = text._origins
    if len(origins) != n_inside:
        origins = ""
        for character, origin in zip(plain(text), text._origins):
            origins += origin * (len(write(character)) - 2)
    if len(origins) != n_inside:  # quotes that are escaped only beside others
        origins = chr(UNCLEAR) * n_inside
    return TracedText(quoted, chr(TEMPLATE) + origins + chr(TEMPLATE))


def as_text(value: Any) -> Any:
    """A list or an object as the text that templates write of it; other values stay as they are."""
    if isinstance(value, list | tuple | dict):
        return call(repr, value, is_quoted=True)
    return value
