"""Small children's stories from a probabilistic grammar, each with its exact probability.

`tales.grammar` is text that people can read and edit. A rule is a list of weighted alternatives; an alternative is made
of four constructs, and of nothing else:

    plain text      stands for itself; `//` begins a new paragraph
    <rule>          one of that rule's alternatives
    {name:list}     draws a word of the list, all equally likely, and binds it to the name; `{:list}` binds nothing
    {name}          the word that is bound to the name

`{a name:list}` and `{a name}` put "a" or "an" in front, `{A name}` does so at the start of a sentence, and a capital in
`{Name}` or `{:List}` capitalises the word. `{name.he}` is the form `he` that the word's list declares, a pronoun.

No choice depends on what was chosen before it, so probabilities multiply, and the entropy of the whole language is a
short sum. Telling a story and parsing one are two walks through the same grammar.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

SLOT = re.compile(r"\{(?:([aA]) )?([A-Za-z]*)(?:\.([A-Za-z]+))?(?::([A-Za-z]+))?\}|<([a-z0-9_]+)>")
WORD_WITH_ARTICLE = re.compile(r"(?:[Aa]n? )?[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*")
WORD = re.compile(r"[a-z0-9_]+(?:['-][a-z0-9_]+)*")  # an underscore stands for a slot, see _skeleton

Item = dict[str, str]  # a word in all its forms: "" as it is, "^" capitalised, "a" and "A" with article, ".he" pronouns


class Choice(NamedTuple):
    """One random choice of a story."""

    kind: str  # "fact": a slot whose word is said again later, "filler": any other slot, "plot": an alternative
    name: str  # of the slot (of its list where it binds nothing) or of the rule
    value: str  # the drawn word, or the number of the alternative
    log_prob: float  # nats


@dataclass(frozen=True)
class Story:
    """A story, the choices that made it in the order of the text, and the sum of their log-probabilities in nats."""

    text: str
    choices: tuple[Choice, ...]
    log_prob: float


class Text(NamedTuple):
    """Words as they stand."""

    text: str


class SampleWord(NamedTuple):
    """A word drawn from a list, kept under a name."""

    name: str  # "" where nothing is bound
    source: str
    form: str
    items: tuple[Item, ...]
    by_surface: dict[str, Item]
    log_prob: float


class RecallWord(NamedTuple):
    """A word that was drawn before."""

    name: str
    form: str


class Call(NamedTuple):
    """What a rule comes to."""

    rule: Rule


Op = Text | SampleWord | RecallWord | Call


class Rule:
    """Weighted alternatives, each a tuple of the four constructs."""

    def __init__(self, name: str, weights: list[int]) -> None:
        self.name = name
        self.alternatives: list[tuple[Op, ...]] = []
        total = sum(weights)
        self.cumulative = [weight / total for weight in accumulate(weights)][:-1]  # empty: there is nothing to choose
        self.choices = [Choice("plot", name, str(n), math.log(weight / total)) for n, weight in enumerate(weights)]


class Grammar:
    """The grammar file, read and checked; a mistake in it is ours, and an AssertionError says where it is."""

    def __init__(self, source: str) -> None:
        self.lists: dict[str, tuple[Item, ...]] = {}
        self.rules: dict[str, Rule] = {}
        self.articles: dict[str, str] = {}
        self.reached: set[str] = set()  # the rules and lists that some story can use
        unread: list[tuple[Rule, int, str]] = []  # alternatives, which may name rules that come later in the file
        line = 0
        for block in re.split(r"\n(?=\S)", "\n" + re.sub(r"(?m)^#.*|[ \t]+$", "", source)):
            head, _, body = block.partition("\n")
            kind, _, name = head.partition(" ")
            if kind == "article":
                self.articles.update(dict.fromkeys(body.split(), name))
            elif kind == "list":
                self._read_list(name, body, line)
            elif kind == "rule":
                assert name not in self.rules, f"line {line}: rule {name} is there twice"
                before, *parts = re.split(r"(?m)^ +(\d+)\|", body)
                assert not before.strip(), f"line {line}: rule {name} needs `weight| text`"
                self.rules[name] = Rule(name, [int(weight) for weight in parts[::2]])
                for text in parts[1::2]:
                    unread.append((self.rules[name], line, " ".join(text.split()).replace(" // ", "\n\n")))
            else:
                assert not block.strip(), f"line {line}: neither list, rule nor article: {head}"
            line += block.count("\n") + 1
        for rule, line, text in unread:
            rule.alternatives.append(tuple(self.read_text(text, line)))
        self.story = self.rules["story"]
        self._check(self.story, frozenset(), ())
        unused = (self.rules.keys() | self.lists.keys()) - self.reached
        assert not unused, f"never used: {sorted(unused)}"

    def _read_list(self, head: str, body: str, line: int) -> None:
        name, *options = head.split()
        assert name not in self.lists, f"line {line}: list {name} is there twice"
        if options[:1] == ["="]:  # a union of earlier lists
            self.lists[name] = tuple(item for part in options[1:] for item in self.lists[part])
            self.reached.update(options[1:])
        else:
            pronouns = [option.split("=") for option in options]
            self.lists[name] = tuple(self._item(word, pronouns, line) for word in body.split())
        words = {item[""] for item in self.lists[name]}
        assert len(words) == len(self.lists[name]) > 1, f"line {line}: list {name} repeats a word or has only one"

    def _item(self, word: str, pronouns: list[list[str]], line: int) -> Item:
        assert WORD_WITH_ARTICLE.fullmatch(word), f"line {line}: not a single word: {word}"
        article = self.articles.get(word, "an" if word[0] in "aeiouAEIOU" else "a")
        item = {"": word, "^": _capital(word), "a": f"{article} {word}", "A": f"{_capital(article)} {word}"}
        for form, pronoun in pronouns:
            item |= {f".{form}": pronoun, f".{_capital(form)}": _capital(pronoun)}
        return item

    def read_text(self, text: str, line: int) -> Iterator[Op]:
        """The constructs of one line of the grammar."""
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
            form = article or (f".{pronoun}" if pronoun else "^" if (name or source)[0].isupper() else "")
            name, source = (part and part[0].lower() + part[1:] for part in (name, source))
            if source:
                assert source in self.lists, f"line {line}: there is no list {source}"
                assert not pronoun, f"line {line}: {name} must be bound before it has a pronoun"
                items = self.lists[source]
                yield SampleWord(name, source, form, items, {item[form]: item for item in items}, -math.log(len(items)))
            else:
                yield RecallWord(name, form)
        if end < len(text):
            yield Text(text[end:])

    def _check(self, rule: Rule, bound: frozenset[str], callers: tuple[str, ...]) -> frozenset[str]:
        """The names that are bound after the rule whatever its alternative, given those bound before it."""
        assert rule.name not in callers, f"rule {rule.name} calls itself"
        self.reached.add(rule.name)
        after = []
        for ops in rule.alternatives:
            names = bound
            for op in ops:
                if isinstance(op, Call):
                    names = self._check(op.rule, names, (*callers, rule.name))
                elif isinstance(op, SampleWord):
                    assert op.name not in names, f"rule {rule.name}: {op.name} is bound already"
                    self.reached.add(op.source)
                    names = names | {op.name} if op.name else names
                elif isinstance(op, RecallWord):
                    assert op.name in names, f"rule {rule.name}: nothing is bound to {op.name}"
            after.append(names)
        return frozenset.intersection(*after)


def _capital(word: str) -> str:
    return word[0].upper() + word[1:]


_SOURCE = (Path(__file__).parent / "tales.grammar").read_bytes()
GRAMMAR = Grammar(_SOURCE.decode("ascii"))
GRAMMAR_HASH = hashlib.sha256(_SOURCE).hexdigest()

_RECALL = "recall"  # the kind of an event that is no choice: a bound word is said again


def generate_story(seed: int, index: int) -> Story:
    """The index-th story of the seed's stream: always the same one, independent of all others."""
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
                events.append(Choice(_RECALL, op.name, op.form, 0.0))
            elif kind is SampleWord:
                item = op.items[int(uniform() * len(op.items))]
                pieces.append(item[op.form])
                bound[op.name] = item
                events.append(Choice("filler", op.name or op.source, item[""], op.log_prob))
            else:
                walk(op.rule)

    walk(GRAMMAR.story)
    return _story("".join(pieces), events)


def derivations(text: str) -> Iterator[Story]:
    """Every way in which the grammar can tell exactly this text, by depth-first search with an explicit stack."""
    # A state: position in the text, operations, the next of them, the caller's (operations, next, caller), bindings,
    # events. Bindings are copied when they change and events are linked backwards, so states can share them.
    stack: list[tuple] = [(0, (Call(GRAMMAR.story),), 0, None, {}, None)]
    while stack:
        position, ops, step, caller, bound, events = stack.pop()
        while True:
            if step == len(ops):
                if caller is None:
                    if position == len(text):
                        yield _story(text, _unlink(events))
                    break
                ops, step, caller = caller
                continue
            op = ops[step]
            step += 1
            kind = type(op)
            if kind is Text:
                if not text.startswith(op.text, position):
                    break
                position += len(op.text)
            elif kind is RecallWord:
                surface = bound[op.name][op.form]
                if not text.startswith(surface, position):
                    break
                position += len(surface)
                events = (Choice(_RECALL, op.name, op.form, 0.0), events)
            elif kind is SampleWord:
                match = WORD_WITH_ARTICLE.match(text, position)
                item = op.by_surface.get(match.group()) if match else None
                if item is None:
                    break
                position = match.end()
                if op.name:
                    bound = {**bound, op.name: item}
                events = (Choice("filler", op.name or op.source, item[""], op.log_prob), events)
            else:
                rule, caller = op.rule, (ops, step, caller)
                if rule.cumulative:
                    for alternative, choice in zip(rule.alternatives, rule.choices):
                        first = alternative[0]
                        if type(first) is not Text or text.startswith(first.text, position):
                            stack.append((position, alternative, 0, caller, bound, (choice, events)))
                    break
                ops, step = rule.alternatives[0], 0


def parse(text: str) -> Story:
    """The story that has this text, with its choices; ValueError where the grammar cannot tell such a story."""
    found = list(derivations(text))
    if not found:
        raise ValueError("this text is no story of the grammar")
    assert len(found) == 1, f"the grammar is ambiguous: {len(found)} derivations of {text!r}"
    return found[0]


def _unlink(events: tuple | None) -> list[Choice]:
    choices = []
    while events is not None:
        choice, events = events
        choices.append(choice)
    return choices[::-1]


def _story(text: str, events: list[Choice]) -> Story:
    # A pronoun recalls nothing that has to be remembered word for word.
    recalled = {event.name for event in events if event.kind == _RECALL and not event.value.startswith(".")}
    choices = tuple(
        event._replace(kind="fact") if event.kind == "filler" and event.name in recalled else event
        for event in events
        if event.kind != _RECALL
    )
    return Story(text, choices, sum(choice.log_prob for choice in choices))


@cache
def entropy() -> float:
    """The exact entropy of the grammar in nats a story: the mean of the negative log-probability over all stories."""

    def of_op(op: Op) -> float:
        return of(op.rule) if isinstance(op, Call) else -op.log_prob if isinstance(op, SampleWord) else 0.0

    def of(rule: Rule) -> float:
        return sum(
            math.exp(choice.log_prob) * (sum(map(of_op, ops)) - choice.log_prob)
            for choice, ops in zip(rule.choices, rule.alternatives)
        )

    return of(GRAMMAR.story)
