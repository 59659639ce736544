"""The needle test on `tales`: a fact was said n tokens ago; does the model still use it?

A needle is a story of the grammar up to the place where a fact's word is said for the second time. Each comes back in
the phrase that it came in, `from Flint`, `the magic lantern`, so the phrase tells which fact is meant. Stories go on
for some 140 tokens after a fact; for longer distances the hero has encounters between the first paragraph and the
second, as the grammar tells them (`go // meet kind`: some food is taken along, an animal gets it), as many as bring the
farthest fact nearest to n: sentences that the model has read, but never so many of them.

The distance, from the first token of the word to that of its second mention, is within n/16 of n; the word is nowhere
else before. Right is an answer if the model finds the word likelier than all others of its list in the grammar; out of
that are words which begin another (`ball`, `balloon`), since they could never be the less likely ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate, islice
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.data import tales
from thinker.data.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.model import Thinker
from thinker.runtime.errors import UserError

# What stands before a fact's word both times. The lists of words have the facts' names.
PHRASES = {"town": "from", "hobby": "loved", "friend": "friend", "thing": "magic", "password": "was"}
PHRASES |= {"pet": "the", "food": "some", "look": "very", "wild": "old"}
GRAMMAR = tales.GRAMMAR  # told here in parts; tales.generate_story() tells whole stories
WORDS = {name: [item[""] for item in GRAMMAR.lists[name]] for name in PHRASES}
VALUES = {
    name: [w for w in words if not any(o != w and o.startswith(w) for o in words)] for name, words in WORDS.items()
}
HEROES_AND_PETS = {item[""]: item for name in ("girl", "boy", "pet") for item in GRAMMAR.lists[name]}
TRIES = 100  # stories told for each needle, at most
VALUES_AT_ONCE = 16  # of several tokens each, in one pass


class Needle(NamedTuple):
    """A text, to be continued by " " and its value; the fact's name; tokens from the BOS token on; the distance."""

    text: str
    value: str
    name: str
    tokens: list[int]
    distance: int


def say(ops: Iterable[tales.Op], random: Random, bound: dict[str, tales.Item]) -> str:
    """Text of the grammar, as tales.generate_story() draws it where all alternatives have the same weight."""
    text = ""
    for op in ops:
        match op:
            case tales.Text(plain):
                text += plain
            case tales.Call(rule):
                text += say(random.choice(rule.alternatives), random, bound)
            case tales.SampleWord(name, _, form, items):
                bound[name] = random.choice(items)
                text += bound[name][form]
            case tales.RecallWord(name, form):
                text += bound[name][form]
    return text


def needles_of(text: str, facts: dict[str, str], tokenizer: Tokenizer) -> list[Needle]:
    """Every fact of a text that comes back in the phrase it came in, and nowhere before, at whatever distance."""
    tokens, needles = tokenizer.encode(text), []
    number = {at: n for n, at in enumerate(accumulate((len(tokenizer.token_bytes(i)) for i in tokens), initial=0))}
    words = [(found.start() - 1, found.group()) for found in re.finditer(r"[\w-]+", text)]  # each with its space
    for name in [name for name in PHRASES if facts.get(name) in VALUES[name]]:
        places = [at for at, word in words if word == facts[name]][:2]
        marked = all(text[:at].lower().endswith(PHRASES[name]) and at in number for at in places)
        if marked and len(places) == 2:
            first, again = (number[at] for at in places)
            before = [tokenizer.bos_id, *tokens[:again]]
            needles.append(Needle(text[: places[1]], facts[name], name, before, again - first))
    return needles


def tell(tokenizer: Tokenizer, distance: int, random: Random) -> list[Needle]:
    """A story's needles at about this distance."""
    story = tales.generate_story(random.getrandbits(64), 0)
    facts = {choice.name: choice.value for choice in story.choices if choice.kind == "fact"}
    needles = needles_of(story.text, facts, tokenizer)
    missing = distance - max((needle.distance for needle in needles), default=distance)
    bound, encounters = {name: HEROES_AND_PETS[facts[name]] for name in ("hero", "pet")}, ""
    while missing > 0:
        more = say(GRAMMAR.read_text("\n\n<go>\n\n<meet> <kind>", 0), random, bound)
        length = len(tokenizer.encode(more))
        if length >= 2 * missing:
            break  # it would lead further away
        encounters, missing = encounters + more, missing - length
    if encounters:
        needles = needles_of(story.text.replace("\n\n", encounters + "\n\n", 1), facts, tokenizer)
    return [needle for needle in needles if abs(needle.distance - distance) <= distance / 16]


def make_needles(tokenizer: Tokenizer, distance: int, n_examples: int, seed: int) -> list[Needle]:
    """So many needles, each of a story of its own, the same for a seed; fewer where few stories have that distance."""
    random = Random(f"{seed}:{distance}")
    stories = (tell(tokenizer, distance, random) for _ in range(TRIES * n_examples))
    return [random.choice(needles) for needles in islice(filter(None, stories), n_examples)]


@torch.no_grad()
def log_probs(model: Thinker, context: list[int], values: list[list[int]]) -> Tensor:
    """ln P of the tokens of each of A values after a context, (A,) in float64.

    Values of one token share one pass; of longer ones all but the last token is read behind the context.
    """
    heads = sorted({tuple(value[:-1]) for value in values})
    longest = max(map(len, heads))
    known: dict[tuple[int, ...], Tensor] = {}
    for start in range(0, len(heads), VALUES_AT_ONCE):
        part = heads[start : start + VALUES_AT_ONCE]
        rows = [[*context, *head, *[0] * (longest - len(head))] for head in part]  # nobody sees what follows
        hidden = hidden_states(model, torch.tensor(rows, device=model.device))[:, len(context) - 1 :]
        known |= zip(part, model.lm_head(hidden).float().log_softmax(dim=-1).cpu())  # (longest + 1, V) each
    sums = [known[tuple(value[:-1])][range(len(value)), value].double().sum() for value in values]
    return torch.stack(sums)


def needle_test(
    model: Thinker, tokenizer: Tokenizer, distance: int, n_examples: int = 64, seed: int = 0
) -> dict[str, Any]:
    """The accuracy at a distance, its error √(p(1 − p)/n), the mean probability of the right value, and chance.

    Or, as "unreachable", why there are none: the model's positions end, or no story has such a distance.
    """
    needles, rows = make_needles(tokenizer, distance, n_examples, seed), []
    if not needles:
        return {"distance": distance, "unreachable": "no story says a fact again at that distance"}
    if min(len(needle.tokens) for needle in needles) < model.config.prefix:
        reason = f"the model reads its first {model.config.prefix} tokens both ways, and would see what it is asked"
        return {"distance": distance, "unreachable": reason}
    for needle in needles:
        try:
            nats = log_probs(model, needle.tokens, [tokenizer.encode(f" {value}") for value in VALUES[needle.name]])
        except UserError as error:
            return {"distance": distance, "unreachable": str(error)}
        right = VALUES[needle.name].index(needle.value)
        rows.append([nats.argmax() == right, nats.softmax(dim=0)[right], 1 / len(nats)])
    accuracy, probability, chance = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    figures = {"accuracy": accuracy, "error": (accuracy * (1 - accuracy) / len(rows)) ** 0.5}
    figures |= {"probability": probability, "chance": chance}
    return {"distance": distance, "n_examples": len(rows), **figures}


def table(figures: list[dict[str, Any]]) -> str:
    """What needle_test found, one distance a line."""
    lines = [f"{'distance':>15}  {'accuracy':>12}  {'error':>6}  {'probability':>11}  {'chance':>6}"]
    for one in figures:
        line = "{accuracy:12.3f}  {error:6.3f}  {probability:11.3f}  {chance:6.3f}"
        lines.append(f"{one['distance']:>15}  " + (one.get("unreachable") or line.format(**one)))
    return "\n".join(lines)
