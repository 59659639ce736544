"""Needle test on `tales`: does the model use a fact that was mentioned n tokens ago?

A needle is a story of the grammar, cut where a fact's word occurs for the second time. The word follows the same phrase
both times (`from Flint`, `the magic lantern`), so the phrase determines which fact is meant. Stories continue for about
140 tokens after a fact. For longer distances, encounters of the hero are inserted between the first two paragraphs, in
the grammar's own words (`go // meet kind`), until the farthest fact is about n tokens away: the model
was trained on such sentences, but never on so many in one story.

The distance between the first tokens of the two mentions is within n/16 of n, and the word occurs nowhere else. An
answer is correct if the word is more likely than all other words of its list in the grammar. Words that are a prefix of
another (`ball`, `balloon`) are left out, because they could never be less likely.
"""

import re
from collections.abc import Callable, Iterable
from itertools import accumulate, islice
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.data.text import tales
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.long_context import hidden_states
from thinker.model import Thinker
from thinker.runtime.errors import UserError

PHRASES = {  # name of a fact and its word list -> phrase before the fact's word
    "town": "from", "hobby": "loved", "friend": "friend", "thing": "magic", "password": "was", "pet": "the",
    "food": "some", "look": "very", "wild": "old",
}  # fmt: skip
GRAMMAR = tales.GRAMMAR  # expanded in parts; tales.generate_story() expands whole stories
WORDS = {name: [item[""] for item in GRAMMAR.lists[name]] for name in PHRASES}
VALUES = {
    name: [
        word
        for word in words
        if not any(other != word and other.startswith(word) for other in words)
    ]
    for name, words in WORDS.items()
}
HEROES_AND_PETS = {
    item[""]: item for name in ("girl", "boy", "pet") for item in GRAMMAR.lists[name]
}
MAX_STORIES = 100  # generated per needle
MAX_PREFIXES_PER_BATCH = 16
Scorer = Callable[[Thinker, list[int], list[list[int]]], Tensor]


class Needle(NamedTuple):
    """A text, and the value that continues it after a space."""

    text: str
    value: str
    name: str  # of the fact
    tokens: list[int]  # of the text, after the BOS token
    distance: int


def expand(ops: Iterable[tales.Op], random: Random, bound: dict[str, tales.Item]) -> str:
    """Expand part of the grammar like tales.generate_story(), for alternatives of equal weight."""
    text = ""
    for op in ops:
        match op:
            case tales.Text(plain):
                text += plain
            case tales.Call(rule):
                text += expand(random.choice(rule.alternatives), random, bound)
            case tales.SampleWord(name, _, form, items):
                bound[name] = random.choice(items)
                text += bound[name][form]
            case tales.RecallWord(name, form):
                text += bound[name][form]
    return text


def find_needles(text: str, facts: dict[str, str], tokenizer: Tokenizer) -> list[Needle]:
    """Find all facts of a text that recur after their phrase, at any distance."""
    tokens, needles = tokenizer.encode(text), []
    lengths = [len(tokenizer.token_bytes(token)) for token in tokens]
    # The first token may start below 0, because some tokenizers add a space before the text, which is ASCII.
    token_starts = accumulate(lengths, initial=len(text) - sum(lengths))
    token_index = {start: index for index, start in enumerate(token_starts)}
    words = [
        (match.start() - 1, match.group()) for match in re.finditer(r"[\w-]+", text)
    ]  # including the space before
    for name, phrase in PHRASES.items():
        if facts.get(name) not in VALUES[name]:
            continue
        starts = [start for start, word in words if word == facts[name]][:2]
        follow_phrase = all(
            text[:start].lower().endswith(phrase) and start in token_index for start in starts
        )
        if len(starts) == 2 and follow_phrase:
            first, second = (token_index[start] for start in starts)
            context = [tokenizer.bos_id, *tokens[:second]]
            needles.append(Needle(text[: starts[1]], facts[name], name, context, second - first))
    return needles


def story_needles(tokenizer: Tokenizer, distance: int, random: Random) -> list[Needle]:
    """Generate a story and return its needles at about this distance."""
    story = tales.generate_story(random.getrandbits(64), 0)
    facts = {choice.name: choice.value for choice in story.choices if choice.kind == "fact"}
    needles = find_needles(story.text, facts, tokenizer)
    n_missing = distance - max((needle.distance for needle in needles), default=distance)
    bound, encounters = {name: HEROES_AND_PETS[facts[name]] for name in ("hero", "pet")}, ""
    while n_missing > 0:
        encounter = expand(GRAMMAR.read_text("\n\n<go>\n\n<meet> <kind>", 0), random, bound)
        length = len(tokenizer.encode(encounter))
        if length >= 2 * n_missing:
            break  # would overshoot by more than the missing tokens
        encounters += encounter
        n_missing -= length
    if encounters:
        needles = find_needles(story.text.replace("\n\n", encounters + "\n\n", 1), facts, tokenizer)
    return [needle for needle in needles if abs(needle.distance - distance) <= distance / 16]


def make_needles(tokenizer: Tokenizer, distance: int, n_examples: int, seed: int) -> list[Needle]:
    """Create `n_examples` needles from different stories, or fewer if few stories fit; determined by `seed`."""
    random = Random(f"{seed}:{distance}")
    candidates = (
        story_needles(tokenizer, distance, random) for _ in range(MAX_STORIES * n_examples)
    )
    return [random.choice(needles) for needles in islice(filter(None, candidates), n_examples)]


@torch.no_grad()
def log_probs(model: Thinker, context: list[int], values: list[list[int]]) -> Tensor:
    """ln P of each of A values (lists of tokens) after a context, (A,) float64.

    Values that differ only in their last token share a row of the batch.
    """
    prefixes, logprobs = sorted({tuple(value[:-1]) for value in values}), []
    rows = pad_sequence(
        [torch.tensor([*context, *prefix]) for prefix in prefixes], batch_first=True
    )
    for batch in rows.to(model.device).split(MAX_PREFIXES_PER_BATCH):
        hidden = hidden_states(model, batch)[:, len(context) - 1 :]
        logprobs += (
            model.lm_head(hidden).float().log_softmax(dim=-1).cpu()
        )  # (longest prefix + 1, V) each
    after = dict(zip(prefixes, logprobs))
    return torch.stack(
        [after[tuple(value[:-1])][range(len(value)), value].double().sum() for value in values]
    )


def needle_test(
    model: Thinker,
    tokenizer: Tokenizer,
    distance: int,
    n_examples: int = 64,
    seed: int = 0,
    scorer: Scorer = log_probs,
) -> dict[str, Any]:
    """Measure accuracy at a distance, its standard error √(p(1 − p)/n), mean probability of the answer, and chance.

    `scorer`: computes what log_probs() does. If the test is impossible, "unreachable" contains the reason.
    """
    needles, rows, prefix = (
        make_needles(tokenizer, distance, n_examples, seed),
        [],
        model.config.prefix,
    )
    try:
        if not needles:
            raise UserError("no story repeats a fact at that distance")
        if min(len(needle.tokens) for needle in needles) < prefix:
            raise UserError(f"the bidirectional prefix of {prefix} tokens contains the answer")
        for needle in needles:
            values = [tokenizer.encode(f" {value}") for value in VALUES[needle.name]]
            nats, answer = (
                scorer(model, needle.tokens, values),
                VALUES[needle.name].index(needle.value),
            )
            rows.append([nats.argmax() == answer, nats.softmax(dim=0)[answer], 1 / len(nats)])
    except UserError as error:
        return {"distance": distance, "unreachable": str(error)}
    accuracy, probability, chance = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    error = (accuracy * (1 - accuracy) / len(rows)) ** 0.5
    result = {"distance": distance, "n_examples": len(rows), "accuracy": accuracy, "error": error}
    return result | {"probability": probability, "chance": chance}


def format_table(results: list[dict[str, Any]]) -> str:
    """Format the results of needle_test(), one line per distance."""
    lines = [
        f"{'distance':>15}  {'accuracy':>12}  {'error':>6}  {'probability':>11}  {'chance':>6}"
    ]
    numbers = "{accuracy:12.3f}  {error:6.3f}  {probability:11.3f}  {chance:6.3f}"
    lines += [
        f"{one['distance']:>15}  " + (one.get("unreachable") or numbers.format(**one))
        for one in results
    ]
    return "\n".join(lines)
