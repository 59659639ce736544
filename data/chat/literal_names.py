"""Names of special tokens in messages, which stay plain text when a conversation is rendered.

A user who writes `<|im_end|>` must not end a turn. A rendered conversation does not say which of
its characters come from a message. So these names are replaced by marks before a conversation is
rendered, and the marks by the names afterwards.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from thinker.data.tokenizers.tokenizer import Span, Tokenizer, any_name, replace_surrogates
from thinker.runtime.errors import UserError

PRIVATE_USE = range(0xE000, 0xF900)  # characters that mean nothing in Unicode


def special_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The names of special tokens, which a message must not contain as tokens."""
    others = tokenizer.non_special_added_tokens
    return tuple(name for name in tokenizer.special_tokens if name not in others)


class HiddenNames:
    """Replaces names of special tokens in the texts of a conversation by marks, and back.

    A mark is a character that no text contains, a number, and that character again.
    """

    def __init__(self, names: tuple[str, ...], values: list[Any]) -> None:
        """values: all that is rendered, as JSON values. Raises UserError if they leave no
        character for the marks."""
        self.names = names
        self.hidden: list[str] = []  # the text behind each mark
        texts: set[str] = set()
        for value in values:
            map_texts(value, lambda text: texts.add(text) or text, is_messages=False)
        used = set("".join(texts))
        unused = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        self.sign = next(unused, None)
        if self.sign is None:
            raise UserError("a conversation uses all private characters of Unicode; remove some")

    def hide(self, value: Any, is_messages: bool) -> Any:
        """The value with marks in its texts."""
        return map_texts(value, self._hide, is_messages)

    def _hide(self, text: str) -> str:
        # A name may also be put together from the ends of two texts.
        n_start, n_end = _edges(text, self.names)
        middle = text[n_start : len(text) - n_end]
        parts = []
        if n_start:
            parts.append(self._mark(text[:n_start]))
        parts.append(any_name(self.names).sub(lambda match: self._mark(match[0]), middle))
        if n_end:
            parts.append(self._mark(text[len(text) - n_end :]))
        return "".join(parts)

    def _mark(self, text: str) -> str:
        self.hidden.append(text)
        return f"{self.sign}{len(self.hidden) - 1}{self.sign}"

    def reveal(self, text: str, spans: Iterable[Span]) -> tuple[str, list[Span], list[Span]]:
        """Put the names back.

        spans: parts of the text with marks. Returns the text, these parts in it, and the spans of
        what was hidden.
        """
        parts = []
        literal = []
        ends = []  # of each mark, and how much longer the text before it has become
        position = 0
        length = 0
        for match in re.finditer(f"{self.sign}([0-9]+){self.sign}", text):
            name = self.hidden[int(match[1])]
            parts += [text[position : match.start()], name]
            length += match.start() - position
            literal.append((length, length + len(name)))
            length += len(name)
            position = match.end()
            ends.append((position, length - position))
        parts.append(text[position:])

        def moved(place: int) -> int:
            number = bisect_right(ends, place, key=lambda mark: mark[0])
            if number == 0:
                return place
            return place + ends[number - 1][1]

        moved_spans = [(moved(start), moved(end)) for start, end in spans]
        return "".join(parts), moved_spans, literal


def has_names(names: tuple[str, ...], values: list[Any]) -> bool:
    """Whether a text in some JSON values contains a name, or may be a part of one."""
    found: list[str] = []

    def look(text: str) -> str:
        if any_name(names).search(text) or _edges(text, names) != (0, 0):
            found.append(text)
        return text

    for value in values:
        map_texts(value, look, is_messages=False)
    return len(found) > 0


def map_texts(value: Any, change: Callable[[str], str], is_messages: bool) -> Any:
    """A JSON value with changed texts, those of keys included.

    is_messages: the value is a list of messages, whose own keys and roles stay as they are:
    templates read them, and write names with roles.
    """
    if is_messages:
        return [_map_message(message, change) for message in value]
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(item, change, False) for item in value]
    if not isinstance(value, dict):
        return value
    return {change(key): map_texts(item, change, False) for key, item in value.items()}


def _map_message(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    changed = {}
    for key, item in message.items():
        changed[key] = item if key == "role" else map_texts(item, change, False)
    return changed


def clean(value: Any) -> Any:
    """A JSON value without lone surrogates, which no tokenizer can encode."""
    return map_texts(value, replace_surrogates, is_messages=False)


def _edges(text: str, names: tuple[str, ...]) -> Span:
    """How many characters at the start of a text may end a name, and at its end begin one.

    Spaces around the text do not matter, as many templates remove them.
    """
    starts, ends, longest = _parts_of_names(names)
    bare = text.strip()
    n_start = n_end = 0
    for n in range(1, min(longest, len(bare)) + 1):
        if bare[:n] in ends:
            n_start = n + len(text) - len(text.lstrip())
        if bare[-n:] in starts:
            n_end = n + len(text) - len(text.rstrip())
    if n_start + n_end > len(text):
        return len(text), 0
    return n_start, n_end


@lru_cache(16)
def _parts_of_names(names: tuple[str, ...]) -> tuple[set[str], set[str], int]:
    """The beginnings and the ends of names, without whole names, and the longest length."""
    starts = set()
    ends = set()
    longest = 0
    for name in names:
        for n in range(1, len(name)):
            starts.add(name[:n])
            ends.add(name[-n:])
        longest = max(longest, len(name) - 1)
    return starts, ends, longest
