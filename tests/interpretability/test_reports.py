"""What tables say is what was asked for: this position, this head, these tokens."""

import math

import pytest
import torch
from installed import needs

from thinker.data.tokenizers.token_label import token_label
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import comparison, flow, head_reports, heads, prompt_reports
from thinker.interpretability.reports import Prompt, decimal
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = Prompt(torch.arange(10) * 7 % 61, [f"t{i}" for i in range(10)])


def test_the_likeliest_token_of_a_position(random_model):
    model = random_model()
    best = model(PROMPT.tokens[None])[0].argmax(dim=-1).tolist()
    assert [prompt_reports.likeliest_next_token(model, PROMPT, at) for at in range(10)] == best
    assert (
        prompt_reports.likeliest_next_token(model, PROMPT, 3, contrast_token=best[3] ^ 1) == best[3]
    )
    with pytest.raises(UserError, match="--contrast-token is the most likely next token"):
        prompt_reports.report_attribution(model, None, PROMPT, None, best[3], 3)
    with pytest.raises(UserError, match="--contrast-token is the most likely next token"):
        prompt_reports.report_patching(model, None, PROMPT, PROMPT, None, best[-1])


def test_ids_beyond_the_tokenizer_have_labels():
    """A model's vocabulary may be padded."""
    tokenizer = make_tokenizer("byte", [])
    assert [token_label(tokenizer, token) for token in (97, 256, 300)] == ["a", "<|bos|>", "<300>"]


def test_scores_of_repeats_are_not_of_the_prompt(random_model):
    model, random = random_model(), heads.repeated_random_tokens(61, 12)
    found = head_reports.report_heads(model, PROMPT, random, "all")
    repeated, own = model.attention_weights(random), model.attention_weights(PROMPT.tokens[None])
    assert torch.tensor(found.data["induction"]).allclose(
        heads.induction(repeated).mean(dim=1), atol=1e-5
    )
    assert torch.tensor(found.data["duplicate"]).allclose(
        heads.duplicate_token(repeated).mean(dim=1), atol=1e-5
    )
    assert torch.tensor(found.data["entropy"]).allclose(heads.entropy(own)[:, 0], atol=1e-5)
    apart = heads.pairwise_js_divergence(own[:, 0])
    for row in found.rows:
        layer, head = int(row[0]), int(row[1])
        others = {other: apart[layer, head, other].item() for other in range(4) if other != head}
        closest = min(others, key=others.get)
        assert row[-1] == f"{closest} ({others[closest]:.3f})"
    assert f"{sum(1 / (i + 1) for i in range(12, 24)) / 12:.3f}" in found.footer


def test_flow_is_from_the_position(random_model):
    model = random_model()
    weights = model.attention_weights(PROMPT.tokens[None])[:, 0]
    for at in (3, 9):
        found = prompt_reports.report_flow(model, PROMPT, at).data
        assert found["rollout"][-1] == pytest.approx(
            flow.rollout(weights)[-1, at].tolist(), abs=1e-5
        )
        assert found["max_flow"] == pytest.approx(flow.max_flow(weights)[at].tolist(), abs=1e-5)


def test_a_map_names_only_what_is_looked_at(random_model):
    rows = prompt_reports.report_attention_map(
        random_model(attention="window(2)"), PROMPT, 0, 1
    ).rows
    assert [sum(bool(cell) for cell in row[2:]) for row in rows] == [1] + [2] * 9
    for at, row in enumerate(rows):
        assert all(f"({key})" in " ".join(row[2:]) for key in range(max(0, at - 1), at + 1))


def test_over_a_training_the_highest_score_and_whose_it_is(random_model):
    models, random = [random_model(seed) for seed in (0, 1)], heads.repeated_random_tokens(61, 12)
    steps = [(step, lambda m=m: m) for step, m in zip((10, 20), models)]
    found = comparison.report_over_training(steps, None, random, "all")
    for row, model in zip(found.rows, models):
        known = heads.induction(model.attention_weights(random)).mean(dim=1)  # (layers, H)
        layer, head = divmod(int(known.argmax()), 4)
        assert row[found.columns.index("induction")] == f"{known.max():.3f} ({layer}.{head})"


@needs("pruning")
@pytest.mark.parametrize("how", ["zero", "mean", "gradient"])
def test_what_is_pruned_is_chosen_by_what_was_asked_for(random_model, how):
    model = random_model(n_kv_heads=4)
    tokens = (torch.arange(96).reshape(8, 12) * 5) % 61
    texts = tokens, tokens.roll(-1, 1)
    _, found = comparison.report_pruning(model, texts, how, 3, None)
    half = tuple(part[:4] for part in texts)
    if how == "gradient":
        known = heads.importance_by_gradient(model, half[0], targets=half[1])
    else:
        known = heads.importance_by_ablation(model, half[0], how, targets=half[1])
    assert torch.tensor(found.data["value"]).allclose(known.value, atol=1e-5)
    lowest = known.value.flatten().argsort()[:3].tolist()
    assert sorted(found.data["pruned"]) == sorted(divmod(at, 4) for at in lowest)


def test_a_zero_in_a_table_has_no_minus():
    assert [decimal(x, 3) for x in (-0.0004, -0.0006, 0.0, 12.0)] == [
        "0.000",
        "-0.001",
        "0.000",
        "12.000",
    ]
    assert [decimal(x, 3, "+") for x in (-0.0004, -0.0006, 1.5, math.nan)] == [
        "+0.000",
        "-0.001",
        "+1.500",
        "+nan",
    ]
