"""One row, number by number: from scores to weights by hand, whatever there is between them."""

import pytest
import torch

from thinker.interpretability.explain import explain
from thinker.interpretability.reports import Prompt
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = {
    "plain": {}, "mqa": {"n_kv_heads": 1}, "a cap": {"attn_logit_softcap": 2.0}, "a window": {"attention": "window(4)"},
    "by head": {"attention": "heads(window(2), full)"}, "topk": {"attention": "topk(3)"},
    "alibi": {"positions": "alibi"}, "sinks": {"attention_sinks": True}, "prefix": {"attention": "prefix(5)"},
    "sharp": {"std": 2.0, "qk_norm": False},
    "all of it": {"attn_logit_softcap": 3.0, "attention_sinks": True, "positions": "alibi"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", [0, 3])
def test_weights_follow_from_the_numbers(random_model, form, head):
    model = random_model(**FORMS[form])
    prompt = Prompt(torch.arange(12) * 5 % 61, [f"t{i}" for i in range(12)])
    for query in (0, 3, 11):
        found = explain(model, prompt, 1, head, query).data
        weights = model.attention_weights(prompt.tokens[None])[1, 0, head, query]
        scaled = torch.tensor(found["scores"]) * model.config.head_dim**-0.5
        assert found["scaled"] == pytest.approx(scaled.tolist(), abs=1e-4)
        cap = model.config.attn_logit_softcap
        capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
        assert found["capped"] == pytest.approx(capped.tolist(), abs=1e-4)
        final = torch.where(torch.tensor(found["visible"]), capped + torch.tensor(found["bias"]), -torch.inf)
        final = torch.cat([final, torch.tensor([-torch.inf if found["sink"] is None else found["sink"]])])
        assert final.softmax(0)[:-1].tolist() == pytest.approx(weights.tolist(), abs=1e-4)
        made = weights @ torch.tensor(found["values"]).float()
        assert found["head_output"] == pytest.approx(made.tolist(), abs=1e-3)


def test_what_is_seen_is_the_mask_and_not_what_is_left_of_a_weight(random_model):
    model = random_model(**FORMS["sharp"])
    prompt = Prompt(torch.arange(12), [str(i) for i in range(12)])
    report = explain(model, prompt, 0, 0, 8)
    assert report.data["visible"] == [True] * 9 + [False] * 3
    assert 0 in report.data["weights"][:9]
    assert [row[4] for row in report.rows] == ["yes"] * 9 + ["no"] * 3
    sizes = [float(row[-2]) for row in report.rows]
    shares = [float(row[-3]) for row in report.rows]
    assert [float(row[-1]) for row in report.rows] == pytest.approx([a * b for a, b in zip(sizes, shares)], abs=2e-3)


def test_sums_have_no_scores(random_model):
    with pytest.raises(UserError, match="layer 0 is linear attention"):
        explain(random_model(attention="linear(8)"), Prompt(torch.arange(4), list("abcd")), 0, 0, 1)
