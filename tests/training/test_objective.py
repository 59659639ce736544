"""Objectives: the contract of the ordinary one and of a user's."""

import pytest
import torch
import torch.nn.functional as F
from training_contract import a_batch, check_objective, check_resumes
from training_runs import read_metrics

from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.objective import Loss, next_token_loss
from thinker.training.step import loss_values

pytestmark = pytest.mark.usefixtures("one_thread")


def cross_entropy(logits, batch):
    targets = batch.targets.flatten()
    return F.cross_entropy(
        logits.flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )


def small_logits(model, batch):
    """A user's objective: the cross-entropy, and an extra loss that keeps logits small."""
    loss = next_token_loss(model, batch)
    is_counted = batch.targets != IGNORE_INDEX
    squares = (model(batch.inputs).logsumexp(-1).square() * is_counted).sum()
    parts = {"z_loss": (squares, loss.n_targets)}
    return Loss(loss.sum + 1e-2 * squares, loss.n_targets, parts, loss.sum)


def with_squares(logits, batch):
    is_counted = batch.targets != IGNORE_INDEX
    return cross_entropy(logits, batch) + 1e-2 * (logits.logsumexp(-1).square() * is_counted).sum()


OBJECTIVES = {"text": (next_token_loss, cross_entropy), "extra loss": (small_logits, with_squares)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_gradient_is_that_of_the_formula(name, random_model):
    objective, plain = OBJECTIVES[name]
    check_objective(objective, random_model(), plain)


def test_an_objective_of_a_user_resumes_bit_for_bit_and_logs_its_parts(tmp_path, monkeypatch):
    whole = check_resumes(tmp_path, monkeypatch, objective=small_logits)
    lines = [line for line in read_metrics(whole) if "train_loss" in line]
    assert all(line["z_loss"] > 0 for line in lines)


def test_what_a_step_keeps_of_a_loss(random_model):
    loss = small_logits(random_model(), a_batch(61))
    z_loss, n_targets = loss.parts["z_loss"]
    expected = torch.stack([loss.cross_entropy, z_loss, n_targets.float()]).detach()
    assert torch.equal(loss_values(loss), expected)
    text = next_token_loss(random_model(), a_batch(61))
    assert torch.equal(loss_values(text), text.sum.detach()[None])
