"""Attributions: they sum to what they explain, and agree with what happens where it is done."""

import pytest
import torch
from induction_model import V, induction_circuit

from thinker.interpretability import attribution
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = [{}, {"qk_norm": False, "tie_embeddings": True}, {"n_kv_heads": 1, "attention": ["window(5)", "full"]},
         {"positions": "learned", "attention_bias": True}, {"attention": "linear(16)"}]  # fmt: skip
# What other architectures do to the residual stream and the logits.
OTHER_BLOCKS = [
    {"block": "both_norms", "norm": "rmsnorm_one_plus", "embedding_scale": 3.0, "logit_softcap": 0.7},
    {"block": "post_norm", "qk_norm_type": "rmsnorm_width", "logit_scale": 0.3},
    {"block": "post_norm", "norm": "layernorm", "attention_out_bias": True},
    {"block": "parallel", "norm": "layernorm", "attention_out_bias": True, "mlp": "ungated", "mlp_bias": True},
    {"block": "parallel_one_norm", "norm": "layernorm_no_bias", "head_bias": True, "logit_scale": 2.0, "logit_softcap": 1.5},
    {"norm": "layernorm_no_weight", "residual_scale": 0.22, "tie_embeddings": True},
]  # fmt: skip


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (14,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", FORMS + OTHER_BLOCKS, ids=str)
@pytest.mark.parametrize("contrast_token", [None, 7])
@pytest.mark.parametrize("position", [-1, 4])
def test_direct_logit_attribution_sums_to_the_difference(
    random_model, tokens, form, contrast_token, position
):
    model = random_model(**form)
    has_biases = any(name.endswith("bias") for name, _ in model.named_parameters())
    parts = attribution.direct_logit_attribution(model, tokens, 3, contrast_token, position)
    assert bool(parts.biases) == (has_biases and "attention_bias" not in form)
    assert (parts.heads.shape, parts.mlps.shape) == ((2, 4), (2,))
    logits = model(tokens[None])[0, position]
    known = logits[3] - (0 if contrast_token is None else logits[contrast_token])
    assert parts.logit == pytest.approx(known.item(), abs=1e-5)
    total = parts.embedding + (parts.heads.nansum() + parts.mlps.sum()).item() + parts.biases
    assert total == pytest.approx(known.item(), abs=1e-4)


def test_what_the_circuit_says_comes_from_its_induction_head():
    model = induction_circuit()
    tokens = torch.tensor([3, 8, 1, 5, 3, 8])
    parts = attribution.direct_logit_attribution(model, tokens, target=1, contrast_token=5)
    assert parts.heads[1, 0].item() == pytest.approx(parts.logit, abs=1e-4)
    assert parts.heads[0, 0].item() == pytest.approx(0, abs=1e-4)
    clean, corrupt = torch.tensor([3, 8, 1, 5, 3, 8]), torch.tensor([3, 8, 9, 5, 3, 8])
    found = attribution.patch(model, clean, corrupt, target=1, contrast_token=9)
    assert found["embedding"].tolist() == pytest.approx([0, 0, 1, 0, 0, 0], abs=1e-3)
    assert found["blocks.0"].tolist() == pytest.approx([0, 0, 1, 0, 0, 0], abs=1e-3)
    assert found["blocks.1"].tolist() == pytest.approx([0, 0, 0, 0, 0, 1], abs=1e-3)
    lens = attribution.logit_lens(model, clean, position=-1)[:, 0]  # (3, V)
    assert lens.shape == (3, V)
    assert lens.argmax(-1).tolist()[-1] in (1, 8)
    assert lens[2, 1] > lens[1, 1] + 1  # the last layer says it, the first does not


@pytest.mark.parametrize("form", FORMS[:4], ids=str)
@pytest.mark.parametrize("baseline", [None, 5, "embedding"])
def test_integrated_gradients_are_complete(random_model, tokens, form, baseline):
    model = random_model(std=0.15, **form)
    table = model.embedding.weight.detach()
    x, empty = (
        table[tokens],
        {None: table.mean(dim=0), 5: table[5], "embedding": torch.full((32,), 0.1)}[baseline],
    )
    given, y_of_empty, missed = attribution.integrated_gradients(
        model, tokens, 3, 7, baseline=empty if baseline == "embedding" else baseline, tolerance=1e-4
    )
    assert given.shape == (14,)
    with torch.no_grad():
        both = model(embeddings=torch.stack([x, empty.expand_as(x)]))[:, -1]
    known = both[0, 3] - both[0, 7] - both[1, 3] + both[1, 7]
    assert y_of_empty == pytest.approx((both[1, 3] - both[1, 7]).item(), abs=1e-5)
    assert given.sum().item() == pytest.approx(known.item(), abs=1e-3)
    assert abs(missed) < 1e-3
    model.requires_grad_(False)
    again = attribution.integrated_gradients(model, tokens, 3, 7, baseline=empty, tolerance=1e-4)[0]
    torch.testing.assert_close(again, given)


def test_as_many_points_as_it_takes(random_model, tokens):
    model, nearly_nothing = (
        random_model(),
        torch.full((32,), 1e-3),
    )  # where all directions lie close together
    coarse = attribution.integrated_gradients(
        model, tokens, 3, 7, baseline=nearly_nothing, tolerance=torch.inf
    )[2]
    fine = attribution.integrated_gradients(model, tokens, 3, 7, baseline=nearly_nothing)[2]
    assert abs(fine) < abs(coarse) / 100


def test_what_no_token_gives(random_model, tokens):
    model = random_model()
    given, _, _ = attribution.integrated_gradients(model, tokens, 3, 7, position=5)
    assert (given[6:] == 0).all()  # later than what is predicted
    given, _, _ = attribution.integrated_gradients(model, tokens, 3, 7, baseline=int(tokens[2]))
    assert given[2] == 0  # as in the baseline


def test_gradient_times_attention_is_what_a_small_change_does(random_model, tokens):
    model = random_model()
    found = attribution.gradient_times_attention(model, tokens, 3, 7)
    assert found.shape == (2, 4, 14, 14)
    layer, head, query, key = 0, 2, 9, 5
    logits = []
    for step in (-0.02, 0.02):

        def nudge(weights, step=step):
            weights = weights.clone()
            weights[:, head, query, key] *= 1 + step
            return weights

        with torch.no_grad(), model.patch({f"blocks.{layer}.attention.weights": nudge}):
            logits.append(attribution.logit_difference(model(tokens[None]), 3, 7).item())
    assert found[layer, head, query, key].item() == pytest.approx(
        (logits[1] - logits[0]) / 0.04, rel=1e-2
    )
    assert (found.triu(1) == 0).all()


def test_the_last_layers_lens_is_the_logits(random_model, tokens):
    model = random_model()
    lens = attribution.logit_lens(model, tokens)
    with torch.no_grad():
        torch.testing.assert_close(lens[-1], model(tokens[None])[0])
        torch.testing.assert_close(lens[0], model.lm_head(model.norm(model.embedding(tokens))))
    assert lens.shape == (3, 14, 61)
    torch.testing.assert_close(attribution.logit_lens(model, tokens, position=-1), lens[:, -1:])
    torch.testing.assert_close(
        attribution.logit_lens(model, tokens, position=slice(2, 5)), lens[:, 2:5]
    )


def test_patching_all_of_the_stream_brings_all_of_it_back(random_model, tokens):
    model, corrupt = random_model(), tokens.clone()
    corrupt[6] = (corrupt[6] + 1) % 61
    found = attribution.patch(
        model, tokens, corrupt, 3, 7, names=["embedding", "blocks.*", "blocks.*.attention"]
    )
    assert found["embedding"].tolist() == pytest.approx(
        [float(i == 6) for i in range(14)], abs=1e-3
    )
    assert found["blocks.1"].tolist() == pytest.approx(
        [float(i == 13) for i in range(14)], abs=1e-3
    )
    assert found.keys() == {
        "embedding",
        "blocks.0",
        "blocks.1",
        "blocks.0.attention",
        "blocks.1.attention",
    }
    with pytest.raises(UserError, match="use prompts of equal length"):
        attribution.patch(model, tokens, corrupt[1:], 3)
    with pytest.raises(
        UserError, match="^both prompts have the same tokens; change the corrupt prompt"
    ):
        attribution.patch(model, tokens, tokens.clone(), 3)
    with pytest.raises(
        UserError, match="^the target's logit is 0.0000 in both prompts; use other prompts or"
    ):
        attribution.patch(model, tokens, corrupt, 3, 3)
    with torch.no_grad():  # what is left of the difference is about a rounding error
        model.embedding.weight[corrupt[6]] = model.embedding.weight[tokens[6]] * (1 + 1e-6)
    with pytest.raises(UserError, match="in both prompts; use other prompts or another target"):
        attribution.patch(model, tokens, corrupt, 3, 7)
    model = random_model()
    with pytest.raises(UserError, match="cannot be patched by position"):
        attribution.patch(model, tokens, corrupt, 3, names=["blocks.0.attention.weights"])


def test_one_position_alone_is_predicted(random_model, tokens):
    model = random_model()
    for position in (0, 5, -1):
        found = attribution.predict_logit(model, 3, 7, position, tokens=tokens[None])
        logits = model(tokens[None])[0, position]
        assert found.item() == pytest.approx((logits[3] - logits[7]).item(), abs=1e-5)


def test_a_norm_of_the_user_has_no_direct_attribution(random_model, tokens):
    model = random_model()
    model.norm = torch.nn.RMSNorm(32)
    with pytest.raises(UserError, match="direct logit attribution does not know RMSNorm"):
        attribution.direct_logit_attribution(model, tokens, 3)
