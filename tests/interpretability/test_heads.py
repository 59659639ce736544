"""Measures of heads: worked examples, matrices of known answers, a circuit built by hand, ablation
by weights."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from induction_model import T, V, induction_circuit

from thinker.interpretability import heads
from thinker.runtime.errors import UserError

EXAMPLES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "attention_examples.json").read_text()
)
pytestmark = pytest.mark.usefixtures("one_thread")


def uniform(length):
    return torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]


def causal(scores):
    """A random attention matrix: (..., T, T) scores -> rows that sum to 1 over what is not
    later."""
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, -torch.inf).softmax(dim=-1)


def test_three_tokens():
    known = EXAMPLES["three_tokens"]["causal_unscaled"]
    weights = causal(torch.tensor(EXAMPLES["three_tokens"]["scores"]).float())
    torch.testing.assert_close(weights, torch.tensor(known["weights"]).float(), rtol=0, atol=6e-5)
    assert heads.entropy(weights).item() == pytest.approx(
        sum(known["entropy_per_row"]) / 3, abs=6e-5
    )
    assert heads.mean_distance(weights).item() == pytest.approx(
        sum(known["mean_distance_per_row"]) / 3, abs=6e-5
    )
    assert heads.previous_token(weights).item() == pytest.approx(
        known["previous_token_score"], abs=6e-5
    )


def test_four_words():
    weights = torch.tensor(EXAMPLES["four_words"]["causal"])
    known = sum(EXAMPLES["four_words"]["causal_mean_distance_per_row"]) / 4
    assert heads.mean_distance(weights).item() == pytest.approx(known, abs=6e-5)


@given(st.integers(2, 40))
def test_uniform_attention(length):
    weights = uniform(length)
    known = sum(math.log(i + 1) for i in range(length)) / length
    assert heads.entropy(weights).item() == pytest.approx(known, abs=1e-5)
    assert heads.entropy(weights, normalised=True).item() == pytest.approx(1, abs=1e-5)
    assert heads.mean_distance(weights).item() == pytest.approx((length - 1) / 4, abs=1e-4)
    assert heads.first_token(weights).item() == pytest.approx(
        sum(1 / i for i in range(2, length + 1)) / (length - 1)
    )


def test_uniform_attention_with_a_bidirectional_prefix():
    visible = torch.ones(9, 9).tril()
    visible[:4, :4] = 1
    assert heads.entropy(
        visible / visible.sum(dim=-1, keepdim=True), normalised=True
    ).item() == pytest.approx(1)


def test_heads_that_look_at_one_token():
    before = (
        torch.eye(9).roll(-1, dims=-1).tril() + torch.eye(9)[:, :1] * torch.eye(9)[:1]
    )  # row 0 sees itself
    first = torch.zeros(9, 9)
    first[:, 0] = 1
    both = torch.stack([before, first])
    assert heads.previous_token(both).tolist() == [1, 1 / 8]
    assert heads.first_token(both).tolist() == [1 / 8, 1]
    assert heads.entropy(both).tolist() == [0, 0]
    assert heads.entropy(both, normalised=True).tolist() == [0, 0]
    assert heads.mean_distance(both).tolist() == pytest.approx([8 / 9, 4])


def test_a_circuit_built_by_hand_has_the_scores_of_one():
    model = induction_circuit()
    tokens = heads.repeated_random_tokens(V, T // 2, batch=3)
    assert tokens.shape == (3, T)
    assert (tokens[:, : T // 2] == tokens[:, T // 2 :]).all()
    assert all(len(set(row.tolist())) == T // 2 for row in tokens)
    weights = model.attention_weights(tokens)  # (2, B, 1, T, T)
    assert heads.previous_token(weights)[0].flatten().tolist() == pytest.approx([1] * 3, abs=1e-5)
    assert heads.induction(weights)[1].flatten().tolist() == pytest.approx([1] * 3, abs=1e-5)
    assert heads.induction(weights)[0].max() < 0.01
    assert heads.duplicate_token(weights)[1].max() < 0.01
    assert (
        model(tokens)[:, T // 2 : -1].argmax(-1) == tokens[:, T // 2 + 1 :]
    ).all()  # and so it can repeat
    same = torch.eye(T).roll(-T // 2, dims=-1)
    assert heads.duplicate_token(same).item() == 1
    with pytest.raises(UserError, match="cannot sample 13 distinct tokens"):
        heads.repeated_random_tokens(V, 13)


def test_random_tokens_of_some_ids():
    found = heads.repeated_random_tokens(torch.tensor([3, 5, 8]), 2, batch=50)
    assert set(found.flatten().tolist()) == {3, 5, 8}
    assert torch.equal(found[:, :2], found[:, 2:])
    assert (found[:, 0] != found[:, 1]).all()


@settings(deadline=None)
@given(st.integers(0, 99))
def test_redundancy(seed):
    torch.manual_seed(seed)
    weights = causal(4 * torch.randn(2, 3, 7, 7))
    found = heads.pairwise_js_divergence(weights)
    assert found.shape == (2, 3, 3)
    torch.testing.assert_close(found, found.mT)
    assert found.diagonal(dim1=-2, dim2=-1).abs().max() < 1e-6
    p, q = weights[1, 0], weights[1, 2]
    m = (p + q) / 2
    known = (
        (torch.xlogy(p, p) - torch.xlogy(p, m) + torch.xlogy(q, q) - torch.xlogy(q, m)).sum(-1) / 2
    ).mean()
    assert found[1, 0, 2].item() == pytest.approx(known.item(), abs=1e-6)
    assert found.max() <= math.log(2) + 1e-6
    apart = torch.stack([torch.eye(6)[:, [1, 0, 2, 3, 4, 5]], torch.eye(6)[:, [2, 3, 0, 1, 5, 4]]])
    assert heads.pairwise_js_divergence(apart)[0, 1].item() == pytest.approx(math.log(2))


# Importance


def losses(model, tokens):
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def test_ablation_is_the_loss_of_a_model_without_the_heads_columns(random_model):
    tokens = torch.randint(0, 61, (6, 15))
    found = heads.importance_by_ablation(random_model(), tokens)
    assert found.value.shape == (2, 4)
    assert (found.low < found.value).all()
    assert (found.value < found.high).all()
    for layer, head in [(0, 1), (1, 3)]:
        model = random_model()
        plain = losses(model, tokens)
        with torch.no_grad():
            model.blocks[layer].attention.o_proj.weight[:, head * 8 : (head + 1) * 8] = 0
        known = losses(model, tokens) - plain
        assert found.value[layer, head].item() == pytest.approx(known.mean().item(), abs=1e-5)
    one = heads.importance_by_ablation(random_model(), tokens[:1])
    assert one.low.isnan().all()


def test_the_mean_takes_from_a_head_only_what_varies(random_model):
    """A head whose output never varies costs nothing where it is replaced by its mean, and
    something by zero."""
    model = random_model()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.blocks[0].attention, name).weight.zero_()
    model.embedding.weight.data[:] = model.embedding.weight.data[
        0
    ]  # all tokens alike: so is every value
    tokens = torch.randint(0, 61, (4, 12))
    mean = heads.importance_by_ablation(model, tokens, ablation="mean").value[0]
    zero = heads.importance_by_ablation(model, tokens, ablation="zero").value[0]
    assert mean.abs().max() < 1e-5
    assert zero.abs().max() > 1e-2


def test_gradients_find_the_circuit_and_agree_with_autograd_by_hand(random_model):
    model, tokens = random_model(), torch.randint(0, 61, (5, 13))
    found = heads.importance_by_gradient(model, tokens)
    torch.testing.assert_close(found.value.norm(dim=1), torch.ones(2))
    known = torch.zeros(2, 4)
    for row in tokens:
        for layer in range(2):
            gate = torch.ones(4, requires_grad=True)  # ∂L/∂gate = Σ z · ∂L/∂z
            with model.patch(
                {f"blocks.{layer}.attention.heads": lambda z, gate=gate: z * gate[:, None, None]}
            ):
                logits = model(row[None, :-1])
            F.cross_entropy(logits[0], row[1:]).backward()
            known[layer] += gate.grad.abs() / len(tokens)
    torch.testing.assert_close(
        found.value, known / known.norm(dim=1, keepdim=True), rtol=0, atol=1e-5
    )
    model.requires_grad_(False)
    torch.testing.assert_close(heads.importance_by_gradient(model, tokens).value, found.value)


def test_losses_count_what_is_a_target(random_model):
    model, tokens = random_model(), torch.arange(36).reshape(3, 12)
    targets = tokens.roll(-1, 1).clone()
    targets[:, 7:] = -1
    logs = model(tokens).log_softmax(-1).gather(2, targets.clamp_min(0)[..., None])[..., 0]
    known = -logs[:, :7].mean(dim=1)
    torch.testing.assert_close(heads.losses(model, tokens, targets), known, rtol=0, atol=1e-5)


def test_importance_does_not_depend_on_how_many_texts_are_read_at_once(random_model, monkeypatch):
    model, tokens = random_model(), (torch.arange(60).reshape(5, 12) * 7) % 61
    whole = [
        heads.importance_by_ablation(model, tokens, "mean"),
        heads.importance_by_gradient(model, tokens),
    ]
    batches = heads._batches
    monkeypatch.setattr(heads, "_batches", lambda *given: [
        (a, b) for x, y in batches(*given) for a, b in zip(x.split(2), y.split(2))
    ])  # fmt: skip
    again = [
        heads.importance_by_ablation(model, tokens, "mean"),
        heads.importance_by_gradient(model, tokens),
    ]
    for one, other in zip(whole, again):
        torch.testing.assert_close(one.value, other.value, rtol=0, atol=1e-5)


def test_the_gradient_of_a_group_is_that_of_its_heads_together(random_model):
    model, tokens = random_model(n_kv_heads=2), (torch.arange(24).reshape(2, 12) * 5) % 61
    found = heads.importance_by_gradient(model, tokens, by_group=True).value
    known = torch.zeros(2, 2)
    for layer in range(2):
        for group in range(2):  # the derivative of the loss along a gate that scales the group
            for text in tokens:
                gate = torch.ones((), requires_grad=True)

                def scale(z, group=group, gate=gate):
                    return torch.cat(
                        [
                            z[:, :2] * (gate if group == 0 else 1),
                            z[:, 2:] * (gate if group == 1 else 1),
                        ],
                        1,
                    )

                with model.patch({f"blocks.{layer}.attention.heads": scale}):
                    loss = heads.losses(model, text[None]).sum()
                known[layer, group] += torch.autograd.grad(loss, gate)[0].abs() / 2
    torch.testing.assert_close(found, known / known.norm(dim=1, keepdim=True), rtol=0, atol=1e-4)
