"""Where a model of tales pays: along a story, and for the words that the grammar draws."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinker.data.text.tales import Story
from thinker.generation import Generator

PER_MENTION = ("grammar", "first time", "again")
COLUMNS = (*PER_MENTION, "excess per story")


class StoryCosts(NamedTuple):
    """Mean costs in nats."""

    by_position: list[float]  # per token, of the first `width` tokens, the next, ...
    # (facts, 4): what the grammar pays for a word, the model at first and later mentions, and
    # excess
    by_fact: Tensor
    excess: float  # of the model over the grammar, per story


def story_costs(
    generator: Generator, stories: Sequence[Story], facts: Sequence[str], width: int, n_groups: int
) -> StoryCosts:
    """Score stories. `facts`: names of choices whose words come back; `n_groups` of `width` tokens
    are averaged."""
    by_position, by_fact, excess = defaultdict(list), defaultdict(list), 0.0
    for story in stories:
        score = generator.score(story.text)
        excess += (score.nats + story.log_prob) / len(stories)
        nats, at = [0.0] * len(story.text), -1  # tales are ASCII: a byte is a character
        for position, (token, logprob) in enumerate(zip(score.token_ids, score.logprobs)):
            at += len(generator.tokenizer.token_bytes(token))
            nats[at] = -logprob  # at the last character of the token
            by_position[position // width].append(-logprob)
        for name, costs in fact_costs(story, nats).items():
            by_fact[name] += costs
    rows = []
    for name in facts:
        paid, first, again = (by_fact[name, column] for column in PER_MENTION)
        rows.append(
            [
                mean(paid),
                mean(first),
                mean(again),
                (sum(first) + sum(again) - sum(paid)) / len(stories),
            ]
        )
    return StoryCosts(
        [mean(by_position[group]) for group in range(n_groups)], torch.tensor(rows), excess
    )


def fact_costs(story: Story, nats: Sequence[float]) -> dict[tuple[str, str], list[float]]:
    """Costs of the drawn words of a story, by name and column. `nats` has the cost of each
    character."""
    costs, at = defaultdict(list), 0
    for choice in story.choices:
        if choice.kind != "plot":  # find the word, and its repetitions
            word = re.compile(rf"\b{re.escape(choice.value)}\b", re.IGNORECASE)
            first, *again = [match.span() for match in word.finditer(story.text, at)]
            at = first[1]
            costs[choice.name, "grammar"].append(-choice.log_prob)
            costs[choice.name, "first time"].append(sum(nats[slice(*first)]))
            costs[choice.name, "again"] += [sum(nats[slice(*span)]) for span in again]
    return costs


def mean(values: Sequence[float]) -> float:
    """The mean, or NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")
