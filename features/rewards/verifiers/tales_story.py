"""A verifier of stories of `tales`: does a text follow the grammar and keep to its facts?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinker.data.text import tales
from thinker.features.rewards.verifiers.verifier import Answer


@dataclass(frozen=True)
class Bound:
    """A word that a story has introduced, and all words of its list."""

    word: tales.Item
    items: Sequence[tales.Item]


@dataclass(frozen=True)
class Reading:
    """The beginning of a text, read as a story."""

    position: int  # in the text: what is before it has been read
    bound: dict[str, Bound]  # by name
    mentions: int = 0  # of introduced words, and of their pronouns
    wrong: int = 0  # mentions of another word of the same list, such as another town


def tales_story(answer: Answer) -> dict[str, float]:
    """grammar: 1 if prompt and answer are a whole story of `tales`, in which any word of a list may
    stand for a fact. facts: 1 if no fact is wrong, either."""
    reading = read_story(answer.prompt + answer.text)
    if reading is None:
        return {"grammar": 0.0, "facts": 0.0}
    return {"grammar": 1.0, "facts": float(reading.wrong == 0)}


def read_story(text: str) -> Reading | None:
    """The reading of a whole text that has the fewest wrong facts; None if it is no story."""
    readings = _read_rule(tales.GRAMMAR.story, text, Reading(0, {}))
    whole = [reading for reading in readings if reading.position == len(text)]
    return min(whole, key=lambda reading: reading.wrong, default=None)


def _read_rule(rule: tales.Rule, text: str, start: Reading) -> list[Reading]:
    """The readings behind all matches of a rule."""
    found = []
    for alternative in rule.alternatives:
        readings = [start]
        for op in alternative:
            after = []
            for reading in readings:
                after += _read_op(op, text, reading)
            readings = after
        found += readings
    return found


def _read_op(op: tales.Op, text: str, start: Reading) -> list[Reading]:
    """The readings behind all matches of a construct."""
    match op:
        case tales.Call(rule):
            return _read_rule(rule, text, start)
        case tales.Text(plain):
            if not text.startswith(plain, start.position):
                return []
            return [replace(start, position=start.position + len(plain))]
        case tales.SampleWord():
            return _read_new_word(op, text, start)
        case tales.RecallWord():
            return _read_mention(op, text, start)


def _read_new_word(op: tales.SampleWord, text: str, start: Reading) -> list[Reading]:
    """The readings behind any word of a list."""
    word = _word_at(text, start.position)
    for item in op.items:
        if item[op.form] == word:
            bound = start.bound
            if op.name:
                bound = {**bound, op.name: Bound(item, op.items)}
            return [replace(start, position=start.position + len(word), bound=bound)]
    return []


def _read_mention(op: tales.RecallWord, text: str, start: Reading) -> list[Reading]:
    """The readings behind the word that is bound to a name, or behind another one of its list."""
    bound = start.bound[op.name]
    right = bound.word[op.form]
    word = _word_at(text, start.position)
    if op.form.startswith("."):
        known = PRONOUNS[op.form]
    else:
        known = {item[op.form] for item in bound.items}
    if word not in known:
        return []
    wrong = start.wrong + int(word != right)
    end = start.position + len(word)
    return [replace(start, position=end, mentions=start.mentions + 1, wrong=wrong)]


def _word_at(text: str, position: int) -> str:
    """The word at a position, with its article if it has one; "" if there is none."""
    match = tales.WORD_WITH_ARTICLE.match(text, position)
    if match is None:
        return ""
    return match.group()


def _pronouns() -> dict[str, set[str]]:
    """The pronouns of all lists, by form."""
    found: dict[str, set[str]] = {}
    for items in tales.GRAMMAR.lists.values():
        for item in items:
            for form, word in item.items():
                if form.startswith("."):
                    found.setdefault(form, set()).add(word)
    return found


PRONOUNS = _pronouns()
