"""Minimal pairs from the grammar of `tales`: one sentence fits a story of the grammar, the other
differs in one place and fits none.

A pair is the beginning of a story, up to the end of the sentence with the difference. Both texts
have the same number of words. Under the grammar, the bad one has probability 0.

Pairs 2n and 2n + 1 of a phenomenon have the same two words, in two stories: what is right in one is
wrong in the other. A model that only prefers one of the words is right in half of the pairs.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from random import Random
from typing import NamedTuple, TypeVar

from thinker.data.text import tales
from thinker.features.eval_suites.minimal_pairs import MinimalPair

T = TypeVar("T")
VERSION = "1"  # of the pairs; they depend on this file, the grammar and SEED alone
SEED = 0
PAIRS_PER_PHENOMENON = 100
GRAMMAR = tales.GRAMMAR
# Facts that recur, and the lists that one of their words comes from.
FACTS = {
    "hero": ("girl", "boy"),
    "town": ("town",),
    "hobby": ("hobby",),
    "pet": ("pet",),
    "friend": ("friend",),
    "thing": ("thing",),
    "food": ("food",),
    "look": ("look",),
    "wild": ("wild",),
    "surname": ("surname",),
    "password": ("password",),
}
# Lists whose words stand for a class of words.
CLASSES = {
    "adverb": ("manner", "way"),
    "adjective": ("spot", "bloom", "weather", "worry", "glad"),
    "noun": ("place", "bag", "kin"),
}
SENTENCE_END = re.compile(r'[.!?]"?')
TWO_WORDS = re.compile(r"(?<![\w-])([a-z-]+) (?=([a-z-]+)(?![\w-]))")


class Piece(NamedTuple):
    """A part of a story, and the construct that made it."""

    start: int  # in the text
    text: str
    op: tales.Op
    item: tales.Item | None  # of a word

    @property
    def end(self) -> int:
        """Where it ends in the text."""
        return self.start + len(self.text)


class Story(NamedTuple):
    """A story of the grammar, in pieces."""

    text: str
    pieces: list[Piece]


class Change(NamedTuple):
    """A place of a story, with what stands there in the good and in the bad sentence."""

    start: int
    end: int
    good: str
    bad: str


Words = tuple[str, str]


class Phenomenon(NamedTuple):
    """How to make the pairs of a phenomenon."""

    choose: Callable[[Random], Words]  # the two words that a pair contrasts
    find: Callable[[Story, str, str], Iterator[Change]]  # (story, right word, wrong word)
    fact: str = ""  # which has the right word in the story


def tales_pairs(per_phenomenon: int = PAIRS_PER_PHENOMENON, seed: int = SEED) -> list[MinimalPair]:
    """The suite: pairs of each phenomenon, always the same for the same arguments."""
    pairs = []
    for name in PHENOMENA:
        for number in range(per_phenomenon):
            pairs.append(_make_pair(name, number, seed))
    return pairs


def _make_pair(name: str, number: int, seed: int) -> MinimalPair:
    phenomenon = PHENOMENA[name]
    right, wrong = phenomenon.choose(Random(f"{seed}:{name}:{number // 2}"))
    if number % 2:
        right, wrong = wrong, right
    given = {}
    if phenomenon.fact:
        given[phenomenon.fact] = right
    random = Random(f"{seed}:{name}:story {number}")
    changes: list[Change] = []
    while not changes:  # a story may have no place for this phenomenon
        story = _make_story(random, given)
        changes = list(phenomenon.find(story, right, wrong))
    change = _pick(random, changes)
    last = SENTENCE_END.search(story.text, change.end)
    assert last is not None, "a story ends with a sentence"
    before = story.text[: change.start]
    after = story.text[change.end : last.end()]
    return MinimalPair(before + change.good + after, before + change.bad + after, name)


def _pick(random: Random, choices: Sequence[T]) -> T:
    """One of the choices. random.choice() may change with the version of Python; random() not."""
    return choices[int(random.random() * len(choices))]


def _make_story(random: Random, given: dict[str, str]) -> Story:
    """A random story, with given words of facts where their lists have them."""
    text = ""
    pieces = []
    for op, part, item in _expand(GRAMMAR.story, random, {}, given):
        pieces.append(Piece(len(text), part, op, item))
        text += part
    return Story(text, pieces)


def _expand(
    rule: tales.Rule, random: Random, bound: dict[str, tales.Item], given: dict[str, str]
) -> Iterator[tuple[tales.Op, str, tales.Item | None]]:
    """The constructs of a random alternative, each with its text and word."""
    number = bisect(rule.cumulative, random.random())
    for op in rule.alternatives[number]:
        match op:
            case tales.Call(inner):
                yield from _expand(inner, random, bound, given)
            case tales.Text(plain):
                yield op, plain, None
            case tales.SampleWord(name, _, form, items):
                bound[name] = _pick(random, items)
                for item in items:
                    if item[""] == given.get(name):
                        bound[name] = item
                yield op, bound[name][form], bound[name]
            case tales.RecallWord(name, form):
                yield op, bound[name][form], bound[name]


# ---------------------------------------------------------------- places of each phenomenon


def _articles(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`a tidy` or `an tidy`."""
    for piece in story.pieces:
        has_article = isinstance(piece.op, tales.SampleWord) and piece.op.form in ("a", "A")
        article, _, _ = piece.text.partition(" ")
        if has_article and article.lower() == right:
            new = wrong
            if article[0].isupper():
                new = wrong.capitalize()
            yield Change(piece.start, piece.start + len(article), article, new)


def _genders(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`girl named Ada` or `boy named Ada`."""
    for piece in story.pieces:
        match = re.search(rf"\b{right}\b", piece.text)
        if isinstance(piece.op, tales.Text) and match:
            start = piece.start + match.start()
            yield Change(start, start + len(right), right, wrong)


def _pronouns(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`Ada ... she` or `Ada ... he`. The words are girl and boy, names of lists of the grammar."""
    same_gender = GRAMMAR.lists[right][0]
    other_gender = GRAMMAR.lists[wrong][0]
    for piece in story.pieces:
        op = piece.op
        is_pronoun = isinstance(op, tales.RecallWord) and op.form.startswith(".")
        if is_pronoun and piece.text == same_gender[op.form]:
            yield Change(piece.start, piece.end, piece.text, other_gender[op.form])


def _word_orders(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`the magic lamp` or `magic the lamp`."""
    for match in TWO_WORDS.finditer(story.text):
        first, second = match.groups()
        end = match.end() + len(second)
        if first != second:
            yield Change(match.start(), end, f"{first} {second}", f"{second} {first}")


def _word_classes(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`said boldly` or `said chapel`."""
    for piece in story.pieces:
        op = piece.op
        # Any word of the list may stand there, if the story does not come back to it.
        is_filler = isinstance(op, tales.SampleWord) and op.form == "" and op.name == ""
        if is_filler and right in _words(op.source):
            yield Change(piece.start, piece.end, right, wrong)


def _recalls(story: Story, right: str, wrong: str) -> Iterator[Change]:
    """`from Ely ... from Ely` or `from Ely ... from Rhyl`."""
    for piece in story.pieces:
        op = piece.op
        if isinstance(op, tales.RecallWord) and op.form == "" and piece.text == right:
            yield Change(piece.start, piece.end, right, wrong)


# ---------------------------------------------------------------- words of each phenomenon


def _words(list_name: str) -> list[str]:
    return [item[""] for item in GRAMMAR.lists[list_name]]


def _always(first: str, second: str) -> Callable[[Random], Words]:
    return lambda random: (first, second)


def _words_of_two_classes(random: Random) -> Words:
    classes = _pick(random, list(combinations(CLASSES, 2)))
    words = []
    for name in classes:
        words.append(_pick(random, _words(_pick(random, CLASSES[name]))))
    return words[0], words[1]


def _words_of_a_fact(fact: str) -> Callable[[Random], Words]:
    def choose(random: Random) -> Words:
        words = _words(_pick(random, FACTS[fact]))
        first = second = _pick(random, words)
        while second == first:
            second = _pick(random, words)
        return first, second

    return choose


PHENOMENA = {
    "article": Phenomenon(_always("a", "an"), _articles),
    "gender": Phenomenon(_always("girl", "boy"), _genders),
    "pronoun": Phenomenon(_always("girl", "boy"), _pronouns),
    "word_order": Phenomenon(_always("", ""), _word_orders),
    "word_class": Phenomenon(_words_of_two_classes, _word_classes),
}
for _fact in FACTS:
    PHENOMENA[f"recall_{_fact}"] = Phenomenon(_words_of_a_fact(_fact), _recalls, _fact)
