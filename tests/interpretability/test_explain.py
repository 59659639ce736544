"""One row, number by number: from scores to weights by hand, whatever there is between them."""

import json

import pytest
import torch

from thinker.interpretability.explain import explain, explain_vectors
from thinker.interpretability.reports import Prompt
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = {
    "plain": {}, "mqa": {"n_kv_heads": 1}, "a cap": {"attn_logit_softcap": 2.0}, "a window": {"attention": "window(4)"},
    "by head": {"attention": "heads(window(2), full)"}, "topk": {"attention": "topk(3)"},
    "retrieve": {"attention": "retrieve(3, 1)"}, "both": {"attention": "heads(topk(3), retrieve(2, 1))"},
    "alibi": {"positions": "alibi"}, "sinks": {"attention_sinks": True}, "prefix": {"attention": "prefix(5)"},
    "token shift": {"token_shift": True},
    "extra embeddings": {"value_embeddings": True, "bigram_rows": 23},
    "sharp": {"std": 2.0, "qk_norm": False},
    "a temperature": {"attention_temperature": 1.7, "attn_logit_softcap": 2.0},
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
        scaled = (
            torch.tensor(found["scores"])
            * model.config.head_dim**-0.5
            / model.config.attention_temperature
        )
        assert found["scaled"] == pytest.approx(scaled.tolist(), abs=1e-4)
        cap = model.config.attn_logit_softcap
        capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
        assert found["capped"] == pytest.approx(capped.tolist(), abs=1e-4)
        final = torch.where(
            torch.tensor(found["visible"]), capped + torch.tensor(found["bias"]), -torch.inf
        )
        final = torch.cat(
            [final, torch.tensor([-torch.inf if found["sink"] is None else found["sink"]])]
        )
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
    assert [float(row[-1]) for row in report.rows] == pytest.approx(
        [a * b for a, b in zip(sizes, shares)], abs=2e-3
    )


def test_the_picture_begins_with_the_raw_scores_beside_the_scaled_ones(random_model):
    model = random_model()
    prompt = Prompt(torch.arange(9) * 5 % 61, [str(i) for i in range(9)])
    report = explain(model, prompt, 1, 2, 4)
    raw, scaled, masked, weights, _, added = report.panels
    assert report.panels_per_row == 2
    assert (raw.title, scaled.title) == (
        "raw scores: QKᵀ",
        f"scores: QKᵀ ÷ √{model.config.head_dim}",
    )
    with torch.no_grad(), model.record("blocks.1.attention.q", "blocks.1.attention.k") as cache:
        model(prompt.tokens[None])
    q, k = (
        cache[f"blocks.1.attention.{name}"][0, head].double() for name, head in (("q", 2), ("k", 1))
    )
    torch.testing.assert_close(raw.values, q @ k.T)
    torch.testing.assert_close(scaled.values, raw.values * model.config.head_dim**-0.5)
    assert masked.values.isnan().equal(torch.ones(9, 9).triu(1).bool())
    sizes = torch.tensor(report.data["values"]).norm(dim=-1)
    torch.testing.assert_close(added.values, weights.values * sizes, equal_nan=True)


VECTORS = {
    "q": [[1, 0], [0, 2], [1, 1]],
    "k": [[1, 0], [0, 1], [2, 0]],
    "v": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


def test_vectors_in_a_file_need_no_model(tmp_path):
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps(VECTORS | {"tokens": ["a", "b", "c"]}))
    q, k = (torch.tensor(VECTORS[name]).double() for name in "qk")
    for query in (-1, 1):
        report = explain_vectors(path, query)
        position = query % 3
        scores = (q @ k.T)[position]
        assert report.data["scores"] == scores.tolist()
        weights = (scores[: position + 1] / 2**0.5).softmax(0).tolist()
        assert report.data["weights"] == pytest.approx([*weights, *[0] * (2 - position)])
        assert report.data["output"] == pytest.approx(
            report.data["weights"]
        )  # the values are unit vectors
        assert report.header["query"] == f"{position} {'abc'[position]}"
    path.write_text(
        json.dumps(VECTORS | {"q": [[1, 1]], "causal": False})
    )  # the query of the last position
    report = explain_vectors(path, 0)
    assert report.data["weights"] == pytest.approx(
        (torch.tensor([1, 1, 2]) / 2**0.5).softmax(0).tolist()
    )
    assert [panel.rows for panel in report.panels] == [["2 "]] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q is not a list of vectors"),
        ({"k": [[1, 0], [1]]}, "k has 2 vectors; use at most 2048, all of the same length"),
        ({"k": [[1, 0], [1, float("nan")], [1, 1]]}, "k contains infinite or nested values"),
        ({"v": [["a"]] * 3}, "v contains values that are not numbers"),
        ({"v": [[[1]]] * 3}, "v contains infinite or nested values"),
        ({"q": [[10**400, 0]]}, "q contains values that are not numbers"),
        ({"q": [[1e200, 0]], "k": [[1e200, 0]] * 3}, "q·k overflows"),
        ({"q": [[1, 0]] * 4}, r"the shapes are q \(4, 2\), k \(3, 2\), v \(3, 3\)"),
        ({"tokens": ["a"]}, "tokens is not a list of 3 strings"),
        ({"causal": 1}, "causal is 1; use true or false"),
        ({"mask": []}, "has the unknown key 'mask' .available"),
    ],
)
def test_mistakes_in_a_file_of_vectors(tmp_path, change, message):
    (tmp_path / "v.json").write_text(json.dumps(VECTORS | change))
    with pytest.raises(UserError, match=message):
        explain_vectors(tmp_path / "v.json", -1)


def test_queries_that_a_file_does_not_have(tmp_path):
    (tmp_path / "v.json").write_text(json.dumps(VECTORS))
    with pytest.raises(UserError, match="--query is 3; .*v.json has 3 queries"):
        explain_vectors(tmp_path / "v.json", 3)


def test_sums_have_no_scores(random_model):
    with pytest.raises(UserError, match="layer 0 uses linear attention"):
        explain(random_model(attention="linear(8)"), Prompt(torch.arange(4), list("abcd")), 0, 0, 1)
