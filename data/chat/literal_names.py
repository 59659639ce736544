"""Names of special tokens in messages, which stay plain text when a conversation is rendered.

A user who writes `<|im_end|>` must not end a turn, whatever a template makes of the message.
"""

from bisect import bisect_right
from typing import Any

from thinker.data.chat.chat_template import Rendering
from thinker.data.chat.traced_text import UNCLEAR
from thinker.data.tokenizers.tokenizer import Span, Tokenizer, any_name, replace_surrogates
from thinker.runtime.errors import UserError


def special_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The names of special tokens, which a message must not contain as tokens."""
    others = tokenizer.non_special_added_tokens
    return tuple(name for name in tokenizer.special_tokens if name not in others)


def literal_spans(rendered: Rendering, names: tuple[str, ...]) -> list[Span]:
    """The parts of names in a rendered conversation that come from a message, in order.

    A name with such a part is plain text. Raises UserError if the origin of a name is unclear.
    """
    pattern = any_name(names)
    literal: list[Span] = []
    position = 0
    while match := pattern.search(rendered.text, position):
        position = match.start() + 1  # names may overlap
        parts = _common(match.span(), rendered.origins)
        said = [(start, end) for start, end, origin in parts if origin != UNCLEAR]
        if parts and not said:
            raise UserError(
                f"the chat template changes a message in a way that leaves unclear whether "
                f"{match[0]} is a part of it or a special token; change the message or the template"
            )
        for start, end in said:
            if literal and start < literal[-1][1]:
                start = literal.pop()[0]
            literal.append((start, end))
    return literal


def _common(span: Span, others: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The parts of a span that have an origin."""
    start, end = span
    found = []
    number = bisect_right(others, start, key=lambda other: other[1])  # the first that ends later
    while number < len(others) and others[number][0] < end:
        first, last, origin = others[number]
        found.append((max(start, first), min(end, last), origin))
        number += 1
    return found


def clean(value: Any) -> Any:
    """A JSON value without lone surrogates, which no tokenizer can encode."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {replace_surrogates(key): clean(item) for key, item in value.items()}
