"""The needle test on `tales`: a fact was said n tokens ago; does the model still use it?

A needle is a story up to the place where a fact is said again: the town of `from Flint`, the `magic lantern`, any word
that the grammar binds and repeats. Its sentences are the grammar's own, in the grammar's order and with its odds:

    <|bos|> opening home // when, and a plot's beginning
    go // meet kind                                         an encounter: some food is taken along, an animal gets it
    the plot's end, and how pleased they were // night      the story breaks off somewhere, before a fact's word

Up to some 140 tokens it is word for word the beginning of a story that the grammar can tell. For more, the hero has one
encounter after the other, no more than needed: again sentences that the model has read, but not so many. The distance
is that between the first tokens of the word's two mentions, of which the second is left out; it lies within n/16 of n.
The word is nowhere between or before them. Right is an answer if the model finds the word likelier than all others of
the list that it was drawn from; those are out of it that begin another (`ball`, `balloon`), which is never likelier.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from data import tales
from data.tokenizer import Tokenizer
from errors import UserError
from evaluation.long import hidden_states
from model import Thinker

GRAMMAR = tales._GRAMMAR  # told here in parts; tales.tell() tells whole stories
TRIES = 100  # stories that are told for a needle, before the distance counts as one that stories do not have
VALUES_AT_ONCE = 16  # values of several tokens that are read in one pass


@dataclass(frozen=True)
class Needle:
    """A text, to be continued by " " and its value: the likeliest of all `values`, if the fact is used."""

    text: str
    value: str
    values: tuple[str, ...]
    tokens: list[int]  # of the text, from the boundary on
    distance: int  # in tokens


@dataclass(frozen=True)
class NeedleScore:
    """Shares of the needles of a distance; None, with the reason, where there is no figure."""

    distance: int
    n_examples: int
    accuracy: float | None = None
    error: float | None = None  # of the accuracy: √(p(1 − p)/n)
    probability: float | None = None  # given to the right value among all, on average
    chance: float | None = None  # the accuracy of a guess
    reason: str = ""


@dataclass
class Telling:
    """A story on its way: its text, the words that are bound, and every fact as it is said again for the first time."""

    random: Random
    text: str = ""
    bound: dict[str, tales.Item] = field(default_factory=dict)
    said: dict[str, tuple[int, str, tuple[tales.Item, ...]]] = field(default_factory=dict)  # once as yet: where, how
    facts: list[tuple[int, int, str, tuple[str, ...]]] = field(default_factory=list)  # where, again, value, values

    def say(self, ops: Iterable[tales._Op]) -> Telling:
        """Go on as tales.tell() does. Returns itself."""
        for op in ops:
            match op:
                case tales._Text(text):
                    self.text += text
                case tales._Call(rule):
                    self.say(rule.alternatives[bisect(rule.cumulative, self.random.random())])
                case tales._Draw(name, _, form, items):
                    self.bound[name] = self.random.choice(items)
                    self.said[name] = len(self.text), form, items
                    self.text += self.bound[name][form]
                case tales._Recall(name, form):
                    word = self.bound[name][form]
                    if name in self.said and self.said[name][1] == form:
                        first, _, items = self.said.pop(name)
                        self.facts.append((first, len(self.text), word, tuple(item[form] for item in items)))
                    self.text += word
        return self


def tell(tokenizer: Tokenizer, distance: int, random: Random) -> Telling:
    """A story with as many encounters as its farthest fact needs to be said again after `distance` tokens."""
    plot = random.choice([name for name in GRAMMAR.rules if f"{name}_end" in GRAMMAR.rules])
    parts = f"<opening> <home>\n\n<when> <{plot}> ", "<go>\n\n<meet> <kind> ", f"<{plot}_end> <pleased>\n\n<night>"
    head, encounter, tail = (tuple(GRAMMAR._read_text(part, 0)) for part in parts)
    story, reach = Telling(random).say(head), 0
    while reach < distance * 15 / 16:
        story.say(encounter)
        copies = {name: type(held)(held) for name, held in vars(story).items() if name in ("bound", "said", "facts")}
        whole = replace(story, **copies).say(tail)
        first, again, *_ = max(whole.facts, key=lambda fact: fact[1] - fact[0])
        reach = len(tokenizer.encode(whole.text[first:again]))
    return whole


def needles_of(story: Telling, tokenizer: Tokenizer, distance: int) -> Iterator[Needle]:
    """The facts of a story that come back after about so many tokens."""
    for first, again, value, items in story.facts:
        text = story.text[: again - 1]
        near = abs(len(found := tokenizer.encode(text[max(first - 1, 0) :])) - distance) <= distance / 16
        spaced = story.text[first - 1 : first] == story.text[again - 1] == " "  # equal tokens both times
        values = tuple(one for one in items if not any(other != one and other.startswith(one) for other in items))
        once = len(re.findall(rf"\b{re.escape(value)}\b", text)) == 1
        if near and spaced and once and value in values:
            yield Needle(text, value, values, [tokenizer.bos_id, *tokenizer.encode(text)], len(found))


def make_needles(tokenizer: Tokenizer, distance: int, n_examples: int, seed: int) -> list[Needle]:
    """So many needles, each of a story of its own, the same for a seed; fewer where few stories have that distance."""
    random, made = Random(f"{seed}:{distance}"), []
    for _ in range(TRIES * n_examples):
        if found := list(needles_of(tell(tokenizer, distance, random), tokenizer, distance)):
            made.append(random.choice(found))
        if len(made) == n_examples:
            break
    return made


@torch.no_grad()
def log_probs(thinker: Thinker, context: list[int], values: list[list[int]]) -> Tensor:
    """ln P of the tokens of each of A values after a context, (A,) in float64.

    Values of one token share one pass. All but the last token of a longer one is read behind the context.
    """
    heads = sorted({tuple(value[:-1]) for value in values})
    longest = max(map(len, heads))
    found = torch.zeros(len(values), dtype=torch.float64)
    for start in range(0, len(heads), VALUES_AT_ONCE):
        part = heads[start : start + VALUES_AT_ONCE]
        rows = [[*context, *head, *[0] * (longest - len(head))] for head in part]  # nobody sees what follows
        hidden = hidden_states(thinker, torch.tensor(rows, device=thinker.device))[:, len(context) - 1 :]
        known = thinker.head(hidden).float().log_softmax(dim=-1).cpu().double()  # (R, longest + 1, V)
        for place, value in enumerate(values):
            if tuple(value[:-1]) in part:
                found[place] = known[part.index(tuple(value[:-1])), torch.arange(len(value)), value].sum()
    return found


def score(thinker: Thinker, tokenizer: Tokenizer, needles: list[Needle], distance: int) -> NeedleScore:
    """What a model, in the mode that it is in, makes of the needles of a distance."""
    if not needles:
        return NeedleScore(distance, 0, reason="no story says anything again at that distance")
    right, given, chance = [], [], 0.0
    for needle in needles:
        try:
            nats = log_probs(thinker, needle.tokens, [tokenizer.encode(f" {value}") for value in needle.values])
        except UserError as error:  # positions that were learned have an end
            return NeedleScore(distance, 0, reason=str(error))
        place = needle.values.index(needle.value)
        right.append(int(nats.argmax()) == place)
        given.append(nats.softmax(dim=0)[place].item())
        chance += 1 / len(needle.values) / len(needles)
    n, accuracy = len(right), sum(right) / len(right)
    return NeedleScore(distance, n, accuracy, math.sqrt(accuracy * (1 - accuracy) / n), sum(given) / n, chance)
