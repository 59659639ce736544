"""Short children's stories from a probabilistic grammar, each with its exact probability.

`tales.grammar` is plain text that you can edit. A rule is a list of weighted alternatives, which
consist of four constructs:

    plain text      literal text; `//` starts a new paragraph
    <rule>          one of the alternatives of a rule
    {name:list}     a word sampled uniformly from the list and bound to the name, which may be empty
    {name}          the word bound to the name

`{a name:list}` and `{a name}` add "a" or "an", `{A name}` adds it at the start of a sentence, and
a capital letter in `{Name}` or `{:List}` capitalizes the word. `{name.he}` is a pronoun: the form
`he` that the word's list declares.

Choices are independent, so probabilities multiply, and the entropy of the whole language is a short
sum. Each story has only one derivation, which the tests verify by parsing, so its probability is
the product over its choices.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

SLOT = re.compile(r"\{(?:([aA]) )?([A-Za-z]*)(?:\.([A-Za-z]+))?(?::([A-Za-z]+))?\}|<([a-z0-9_]+)>")
WORD_WITH_ARTICLE = re.compile(r"(?:[Aa]n? )?[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")

# The forms of a word: "" plain, "^" capitalized, "a" and "A" with article, ".he" pronouns.
Item = dict[str, str]


class Choice(NamedTuple):
    """One random choice of a story."""

    kind: str  # "fact": a slot whose word recurs, "filler": any other slot, "plot": an alternative
    name: str  # of the slot, of its list if it binds nothing, or of the rule
    value: str  # the sampled word, or the number of the alternative
    log_prob: float  # nats


@dataclass(frozen=True)
class Story:
    """A story and how it came about."""

    text: str
    choices: tuple[Choice, ...]  # in the order of the text
    log_prob: float  # the sum of theirs, in nats


class Text(NamedTuple):
    """Plain text."""

    text: str


class SampleWord(NamedTuple):
    """A word sampled from a list and bound to a name."""

    name: str  # "" if nothing is bound
    source: str
    form: str
    items: tuple[Item, ...]
    log_prob: float


class RecallWord(NamedTuple):
    """A word that is already bound."""

    name: str
    form: str


class Call(NamedTuple):
    """One alternative of a rule."""

    rule: Rule


Op = Text | SampleWord | RecallWord | Call


class Rule:
    """Weighted alternatives, each a tuple of the four constructs."""

    def __init__(self, name: str, weights: list[int]) -> None:
        self.name = name
        self.alternatives: list[tuple[Op, ...]] = []
        total = sum(weights)
        shares = [weight / total for weight in accumulate(weights)]
        self.cumulative = shares[:-1]  # empty for a single alternative
        self.choices = []
        for n, weight in enumerate(weights):
            self.choices.append(Choice("plot", name, str(n), math.log(weight / total)))


class Grammar:
    """The parsed and checked grammar file. Mistakes raise AssertionError with the line."""

    def __init__(self, source: str) -> None:
        self.lists: dict[str, tuple[Item, ...]] = {}
        self.rules: dict[str, Rule] = {}
        self.articles: dict[str, str] = {}
        self.used: set[str] = set()  # rules and lists that a story can use
        unread: list[tuple[Rule, int, str]] = []  # alternatives, which may refer to later rules
        without_comments = re.sub(r"(?m)^#.*|[ \t]+$", "", source)
        line = 0
        for block in re.split(r"\n(?=\S)", "\n" + without_comments):
            head, _, body = block.partition("\n")
            kind, _, name = head.partition(" ")
            if kind == "article":
                self.articles.update(dict.fromkeys(body.split(), name))
            elif kind == "list":
                self._read_list(name, body, line)
            elif kind == "rule":
                assert name not in self.rules, f"line {line}: rule {name} is defined twice"
                before, *parts = re.split(r"(?m)^ +(\d+)\|", body)
                assert not before.strip(), f"line {line}: rule {name} needs `weight| text`"
                # Weights and texts take turns.
                rule = Rule(name, [int(weight) for weight in parts[::2]])
                self.rules[name] = rule
                for text in parts[1::2]:
                    text = " ".join(text.split()).replace(" // ", "\n\n")
                    unread.append((rule, line, text))
            else:
                assert not block.strip(), f"line {line}: neither list, rule nor article: {head}"
            line += block.count("\n") + 1
        for rule, line, text in unread:
            rule.alternatives.append(tuple(self.read_text(text, line)))
        self.story = self.rules["story"]
        self._check(self.story, frozenset(), ())
        unused = (self.rules.keys() | self.lists.keys()) - self.used
        assert not unused, f"never used: {sorted(unused)}"

    def _read_list(self, head: str, body: str, line: int) -> None:
        name, *options = head.split()
        assert name not in self.lists, f"line {line}: list {name} is defined twice"
        items: list[Item] = []
        if options[:1] == ["="]:  # a union of earlier lists
            for part in options[1:]:
                items += self.lists[part]
            self.used.update(options[1:])
        else:
            pronouns = [option.split("=") for option in options]
            items = [self._item(word, pronouns, line) for word in body.split()]
        words = {item[""] for item in items}
        assert len(words) == len(items) > 1, (
            f"line {line}: list {name} repeats a word or has only one"
        )
        self.lists[name] = tuple(items)

    def _item(self, word: str, pronouns: list[list[str]], line: int) -> Item:
        assert WORD_WITH_ARTICLE.fullmatch(word), f"line {line}: not a single word: {word}"
        default = "an" if word[0] in "aeiouAEIOU" else "a"
        article = self.articles.get(word, default)
        item = {
            "": word,
            "^": _capital(word),
            "a": f"{article} {word}",
            "A": f"{_capital(article)} {word}",
        }
        for form, pronoun in pronouns:
            item |= {f".{form}": pronoun, f".{_capital(form)}": _capital(pronoun)}
        return item

    def read_text(self, text: str, line: int) -> Iterator[Op]:
        """Parse a line of the grammar into constructs."""
        assert not re.search(r"[{}<>|]", SLOT.sub("", text)), f"line {line}: cannot read {text}"
        end = 0
        for match in SLOT.finditer(text):
            if match.start() > end:
                yield Text(text[end : match.start()])
            end = match.end()
            article, name, pronoun, source, rule = match.groups()
            if rule:
                assert rule in self.rules, f"line {line}: there is no rule {rule}"
                yield Call(self.rules[rule])
                continue
            form = ""
            if article:
                form = article
            elif pronoun:
                form = f".{pronoun}"
            elif (name or source)[0].isupper():
                form = "^"
            name = _uncapitalized(name)
            if source:
                source = _uncapitalized(source)
                assert source in self.lists, f"line {line}: there is no list {source}"
                assert not pronoun, f"line {line}: {name} must be bound before it has a pronoun"
                items = self.lists[source]
                yield SampleWord(name, source, form, items, -math.log(len(items)))
            else:
                yield RecallWord(name, form)
        if end < len(text):
            yield Text(text[end:])

    def _check(self, rule: Rule, bound: frozenset[str], callers: tuple[str, ...]) -> frozenset[str]:
        """Names bound after a rule in all its alternatives, given the names bound before it."""
        assert rule.name not in callers, f"rule {rule.name} calls itself"
        self.used.add(rule.name)
        after = []
        for ops in rule.alternatives:
            names = bound
            for op in ops:
                if isinstance(op, Call):
                    names = self._check(op.rule, names, (*callers, rule.name))
                elif isinstance(op, SampleWord):
                    assert op.name not in names, f"rule {rule.name}: {op.name} is already bound"
                    self.used.add(op.source)
                    if op.name:
                        names = names | {op.name}
                elif isinstance(op, RecallWord):
                    assert op.name in names, f"rule {rule.name}: nothing is bound to {op.name}"
            after.append(names)
        return frozenset.intersection(*after)


def _capital(word: str) -> str:
    return word[0].upper() + word[1:]


def _uncapitalized(name: str) -> str:
    return name[:1].lower() + name[1:]


GRAMMAR = Grammar(Path(__file__).with_name("tales.grammar").read_text(encoding="ascii"))

RECALL = "recall"  # kind of an event that is not a choice: a bound word recurs


def generate_story(seed: int, index: int) -> Story:
    """Generate story number `index` of a seed.

    It depends on both numbers alone, not on other stories.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    uniform = random.Random(int.from_bytes(digest, "big")).random
    pieces: list[str] = []
    events: list[Choice] = []
    bound: dict[str, Item] = {}

    def walk(rule: Rule) -> None:
        number = 0
        if rule.cumulative:
            number = bisect(rule.cumulative, uniform())
            events.append(rule.choices[number])
        for op in rule.alternatives[number]:
            kind = type(op)
            if kind is Text:
                pieces.append(op.text)
            elif kind is RecallWord:
                pieces.append(bound[op.name][op.form])
                events.append(Choice(RECALL, op.name, op.form, 0.0))
            elif kind is SampleWord:
                item = op.items[int(uniform() * len(op.items))]
                pieces.append(item[op.form])
                bound[op.name] = item
                events.append(Choice("filler", op.name or op.source, item[""], op.log_prob))
            else:
                walk(op.rule)

    walk(GRAMMAR.story)
    return story_of("".join(pieces), events)


def story_of(text: str, events: list[Choice]) -> Story:
    """Create a story from its events in text order.

    They are choices, and recalls, which turn a slot into a fact.
    """
    recalled = set()
    for event in events:
        # A pronoun is not a recall, because it does not require remembering the word.
        if event.kind == RECALL and not event.value.startswith("."):
            recalled.add(event.name)
    choices = []
    for event in events:
        if event.kind == "filler" and event.name in recalled:
            event = event._replace(kind="fact")
        if event.kind != RECALL:
            choices.append(event)
    return Story(text, tuple(choices), sum(choice.log_prob for choice in choices))
