"""The checks of the lesson on training take right answers and name typical mistakes; its table has
the right costs."""

import math
from types import SimpleNamespace

import pytest
import torch

from thinker.data.text.tales import Choice, Story
from thinker.lessons.checks.train_one import check_bits_per_byte, check_diagnoses, check_top_p
from thinker.lessons.materials.story_costs import story_costs


def top_p(divides=True, keeps_crossing=True, sorts=True, restores=True):
    """An answer to the first exercise, with a mistake."""

    def my_top_p(probabilities, p):
        order = (
            probabilities.argsort(descending=True) if sorts else torch.arange(len(probabilities))
        )
        ordered = probabilities[order]
        reached = ordered.cumsum(0)
        kept = torch.where(reached - ordered < p if keeps_crossing else reached <= p, ordered, 0)
        kept = kept / kept.sum() if divides else kept
        return torch.zeros_like(kept).scatter(0, order, kept) if restores else kept

    return my_top_p


def min_p(probabilities, p):
    kept = torch.where(probabilities >= p * probabilities.max(), probabilities, 0)
    return kept / kept.sum()


def at_least_two(probabilities, p):
    return top_p()(probabilities, max(p, 0.5))


WRONG = [
    (check_top_p, top_p(divides=False), "do not sum to 1"),
    (check_top_p, top_p(keeps_crossing=False), "crosses p"),
    (check_top_p, top_p(keeps_crossing=False, divides=False), "crosses p"),
    (check_top_p, top_p(restores=False), "these are sorted"),
    (check_top_p, top_p(sorts=False), "Sort them first"),
    (check_top_p, min_p, "this is min-p"),
    (check_top_p, at_least_two, "not 0.3"),
    (check_top_p, lambda probabilities, p: probabilities, "are left"),
    (check_top_p, lambda probabilities, p: probabilities[:3], "shape"),
    (check_bits_per_byte, 0.3, "nats per byte"),
    (check_bits_per_byte, 1.731, "bits per token"),
    (check_bits_per_byte, 0.208, "Divide by ln 2"),
    (check_bits_per_byte, 6.925, "costs less"),
    (check_bits_per_byte, 3.32, "perplexity"),
    (check_bits_per_byte, 1.0, "nats into bits"),
    (check_diagnoses, "done", "list of three"),
    (check_diagnoses, ["done", "done"], "list of three"),
    (check_diagnoses, ["overfit", "done", "done"], "choose from"),
    (check_diagnoses, ["done", "learning rate", "done"], "it was lower before"),
    (check_diagnoses, ["learning rate", "learning rate", "done"], "steps are not too large"),
    (check_diagnoses, ["overfitting", "overfitting", "done"], "memorizes has a low"),
    (check_diagnoses, ["overfitting", "done", "done"], "how often each token"),
    (check_diagnoses, ["overfitting", "learning rate", "overfitting"], "has not memorized"),
    (check_diagnoses, ["overfitting", "learning rate", "learning rate"], "neither jumps"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def top_p_into_zeros(probabilities, p):
    ordered, order = probabilities.sort(descending=True)
    kept = ordered * (ordered.cumsum(0) - ordered < p)
    result = torch.zeros(len(probabilities))
    result[order] = kept / kept.sum()
    return result


def test_right_answers_are_right():
    assert check_top_p(top_p())
    assert check_top_p(top_p_into_zeros)
    assert check_bits_per_byte(1.2 / math.log(2) / 4)
    assert check_bits_per_byte(0.433)
    assert check_diagnoses(["overfitting", "learning rate", "done"])


class WordGenerator:
    """Scores a text whose tokens are "Ann", " from", ... : token number i costs i + 1 nats."""

    def __init__(self, words):
        self.tokenizer = SimpleNamespace(token_bytes=lambda token: words[token].encode())

    def score(self, text):
        n = len(text.split())
        logprobs = [-float(cost) for cost in range(1, n + 1)]
        return SimpleNamespace(token_ids=range(n), logprobs=logprobs, nats=-sum(logprobs))


def test_costs_belong_to_words_and_positions():
    words = ["Ann", " from", " Ely", " met", " ann", " in", " Ely"]
    choices = (
        Choice("plot", "start", "0", -1.0),
        Choice("fact", "hero", "Ann", -2.0),
        Choice("fact", "town", "Ely", -3.0),
    )
    story = Story("".join(words), choices, -6.0)
    costs = story_costs(
        WordGenerator(words), [story, story], ["town", "hero", "food"], width=2, n_groups=5
    )
    assert costs.by_position[:4] == [1.5, 3.5, 5.5, 7.0]
    assert math.isnan(costs.by_position[4])
    assert costs.by_fact[:2].tolist() == [[3.0, 3.0, 7.0, 7.0], [2.0, 1.0, 5.0, 4.0]]
    assert costs.by_fact[2, :3].isnan().all()
    assert costs.by_fact[2, 3] == 0
    assert costs.excess == 28 - 6


def test_a_word_that_is_drawn_twice_has_two_first_mentions():
    words = ["The", " old", " man", " old"]
    story = Story("".join(words), 2 * (Choice("filler", "trait", "old", -1.0),), -2.0)
    costs = story_costs(WordGenerator(words), [story], ["trait"], width=4, n_groups=1)
    assert costs.by_fact[0, :3].tolist() == [1.0, 3.0, 4.0]  # first mentions cost 2 and 4
