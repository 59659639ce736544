"""The lessons' training learns, repeats with its seed, and is shorter when the lessons are
tested."""

import pytest
import torch
from torch import nn

from thinker.lessons.materials import small_models
from thinker.lessons.materials.practice import lesson_seed, take_steps, train_on_task
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

CONFIG = ThinkerConfig(8, d_model=16, n_layers=1, n_heads=2)


def copy_batch(generator):
    """Tokens, which are their own targets, but for the first."""
    tokens = torch.randint(8, (4, 6), generator=generator)
    return tokens, tokens.masked_fill(torch.arange(6) == 0, -1)


def test_training_learns_and_repeats_with_its_seed():
    model, losses = train_on_task(CONFIG, copy_batch, n_steps=60, lr=1e-2)
    assert losses[0] > 2 > 0.2 > losses[-1]
    assert not model.training
    assert train_on_task(CONFIG, copy_batch, n_steps=60, lr=1e-2)[1] == losses
    assert train_on_task(CONFIG, copy_batch, n_steps=60, lr=1e-2, seed=1)[1] != losses


def test_the_seed_of_the_lessons_is_added(monkeypatch):
    losses = train_on_task(CONFIG, copy_batch, n_steps=3, seed=7)[1]
    monkeypatch.setenv("THINKER_LESSONS_SEED", "5")
    assert lesson_seed() == 5
    assert train_on_task(CONFIG, copy_batch, n_steps=3, seed=2)[1] == losses
    assert train_on_task(CONFIG, copy_batch, n_steps=3, seed=7)[1] != losses


def test_the_batches_depend_on_the_seed_of_the_lessons(monkeypatch):
    first = []
    for seed in ("0", "1"):
        monkeypatch.setenv("THINKER_LESSONS_SEED", seed)
        model = nn.Linear(1, 1)
        seen = []

        def loss_of(tokens, targets, model=model, seen=seen):
            seen.append(tokens)
            return model.weight.sum()

        take_steps(model, loss_of, copy_batch, n_steps=1)
        first.append(seen[0])
    assert not torch.equal(*first)


@pytest.mark.parametrize("text", ["", "one", "-1", "1.5"])
def test_a_seed_is_a_number(monkeypatch, text):
    monkeypatch.setenv("THINKER_LESSONS_SEED", text)
    with pytest.raises(
        UserError, match="THINKER_LESSONS_SEED has to be a number from 0, but it is"
    ):
        lesson_seed()


def test_training_is_shorter_when_lessons_are_tested(monkeypatch):
    monkeypatch.setenv("THINKER_LESSONS_FAST", "1")
    assert len(train_on_task(CONFIG, copy_batch, n_steps=60)[1]) == 6


def test_the_learning_rate_falls_linearly():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    take_steps(model, lambda tokens, targets: model.weight.sum(), copy_batch, n_steps=4, lr=0.1)
    assert model.weight.item() == pytest.approx(
        -0.1 * (1 + 0.75 + 0.5 + 0.25), rel=1e-5
    )  # the gradient is always 1


def test_a_network_of_recall_learns():
    torch.manual_seed(0)
    network = small_models.GRU()
    small_models.train(network, n_steps=40)
    assert small_models.accuracy(network, n_pairs=1) > 2 / small_models.N_KEYS
