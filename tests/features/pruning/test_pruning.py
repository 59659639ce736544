"""Heads taken out for good: the model that is left computes what the whole one does with those
heads set to zero."""

import pytest
import torch
from installed import if_installed

from thinker import checkpoint, interop
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.pruning import pruning, zeros
from thinker.generation import Generator, SamplingParams
from thinker.interop.hf_config import hf_model_type
from thinker.interpretability import heads
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.arange(40).reshape(2, 20) % 61
FORMS = {
    "mha": {"n_kv_heads": 4},
    "gqa": {"n_heads": 6, "n_kv_heads": 3, "head_dim": 8},
    "biases": {"n_kv_heads": 4, "attention_bias": True, "qk_norm": False},
    "sinks and a cap": {"n_kv_heads": 2, "attention_sinks": True, "attn_logit_softcap": 5.0},
    "a window and a linear layer": {"attention": ["window(6)", "linear(16)"], "n_kv_heads": 2},
    "tied": {"n_kv_heads": 4, "tie_embeddings": True},
    "biases everywhere": {
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "block": "parallel",
    },
    "norms of each head": {
        "qk_norm_type": "layernorm_per_head",
        "norm": "layernorm",
        "block": "both_norms",
    },
    "learned positions, no gate": {"positions": "learned", "mlp": "ungated", "block": "post_norm"},
}


def masked(model, groups):
    """Edits that set all the query heads of these KV heads to zero."""
    shared = model.config.n_heads // model.config.n_kv_heads
    names = [(layer, group * shared + i) for layer, group in groups for i in range(shared)]
    return {f"blocks.{layer}.attention.heads.{head}": "zero" for layer, head in names}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [[(0, 1)], [(0, 0), (1, 1)]])
def test_a_pruned_model_equals_the_masked_one(random_model, form, groups):
    model = random_model(**FORMS[form])
    left = pruning.prune(model, groups)
    with model.patch(masked(model, groups)):
        known = model(TOKENS)
    torch.testing.assert_close(left(TOKENS), known, rtol=0, atol=1e-4)
    cache, pieces = left.new_cache(2, 20), []
    for part in TOKENS.split((7, 1, 12), dim=1):
        pieces.append(left(part, cache=cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), known, rtol=0, atol=1e-4)
    assert sum(p.numel() for p in left.parameters()) < sum(p.numel() for p in model.parameters())
    assert (left(TOKENS) - model(TOKENS)).abs().max() > 0.1


def test_as_many_in_every_layer_is_an_ordinary_model(random_model):
    model = random_model(n_kv_heads=2)
    left = pruning.prune(model, [(0, 1), (1, 0)])
    assert (left.config.n_heads, left.config.n_kv_heads, left.config.n_kv_heads_per_layer) == (
        2,
        1,
        None,
    )
    assert left.config.head_dim == model.config.head_dim
    again = pruning.prune(pruning.prune(random_model(n_kv_heads=4), [(0, 0)]), [(0, 0), (1, 3)])
    once = pruning.prune(random_model(n_kv_heads=4), [(0, 0), (0, 1), (1, 3)])
    torch.testing.assert_close(again(TOKENS), once(TOKENS))


def test_it_is_saved_loaded_and_sampled_from(random_model, tmp_path):
    tokenizer = make_tokenizer("byte", [])
    left = pruning.prune(
        random_model(n_kv_heads=4, vocab_size=tokenizer.vocab_size), [(0, 2), (0, 3)]
    )
    checkpoint.save(tmp_path / "pruned", left, {"step": 0})
    again, _ = interop.load(tmp_path / "pruned")
    assert again.config.n_kv_heads_per_layer == [2, 4]
    assert torch.equal(again(TOKENS), left(TOKENS))
    params = SamplingParams(max_new_tokens=24, temperature=0)
    modes = [{"use_cache": False}, {}, {"window": 60}]
    modes += if_installed("speculation", {"speculate": 4})
    told = [
        Generator(left, tokenizer, **mode).generate(["abc"], params)[0].token_ids for mode in modes
    ]
    assert all(tokens == told[0] for tokens in told)
    Generator(left, tokenizer, bits=8).generate(["abc"], params)


def test_it_has_no_form_elsewhere(random_model):
    with pytest.raises(UserError, match="n_kv_heads_per_layer"):
        hf_model_type(pruning.prune(random_model(n_kv_heads=4), [(0, 2)]).config)


def test_looking_into_it(random_model):
    whole = random_model(n_kv_heads=4)
    left = pruning.prune(whole, [(1, 0), (1, 2)])
    weights = left.attention_weights(TOKENS)
    assert weights.shape == (2, 2, 4, 20, 20)
    assert weights[1, :, 2:].isnan().all()
    assert not weights[0].isnan().any()
    with whole.patch(masked(whole, [(1, 0), (1, 2)])):
        known = whole.attention_weights(TOKENS)
    torch.testing.assert_close(weights[1, :, :2], known[1][:, [1, 3]], rtol=0, atol=1e-5)
    for found in (
        heads.importance_by_ablation(left, TOKENS),
        heads.importance_by_gradient(left, TOKENS),
    ):
        assert found.value.isnan().tolist() == [[False] * 4, [False, False, True, True]]
    assert len(pruning.least_important(found.value, 4)) == 4


def test_importance_of_a_group_is_that_of_its_heads_together(random_model):
    model = random_model(n_kv_heads=2)
    found = heads.importance_by_ablation(model, TOKENS, by_group=True)
    with model.patch(masked(model, [(1, 1)])):
        cost = heads.losses(model, TOKENS)
    assert found.value.shape == (2, 2)
    assert found.value[1, 1].item() == pytest.approx(
        (cost - heads.losses(model, TOKENS)).mean().item(), abs=1e-5
    )
    by_gradient = heads.importance_by_gradient(model, TOKENS, by_group=True).value
    assert by_gradient.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_the_least_important_are_taken():
    value = torch.tensor([[0.3, 0.1, 0.2], [0.9, 0.05, torch.nan]])
    found = heads.Importance(value, value, value)
    assert pruning.least_important(found.value, 1) == [(1, 1)]
    assert pruning.least_important(found.value, 3) == [
        (1, 1),
        (0, 1),
        (0, 2),
    ]  # each layer keeps its best one


def test_one_key_head_stays_in_each_layer(random_model):
    pruning.check_count(random_model(n_kv_heads=2), 2)
    for n in (0, 3):
        with pytest.raises(UserError, match=f"cannot remove {n} KV heads, .*; use 1 to 2"):
            pruning.check_count(random_model(n_kv_heads=2), n)


@pytest.mark.parametrize(
    ("form", "groups", "message"),
    [
        ({"n_kv_heads": 2}, [(0, 0), (0, 1)], "layer 0 would have no heads left"),
        ({"n_kv_heads": 2}, [(0, 2)], "layer 0 has no KV head 2"),
        ({"n_kv_heads": 2}, [(5, 0)], "layer 5 has no KV head 0"),
        ({"n_kv_heads": 4, "positions": "alibi"}, [(0, 2)], "does not work with alibi"),
        ({"n_kv_heads": 4, "attention": "heads(full, window(4))"}, [(0, 2)], "per-head patterns"),
    ],
)
def test_what_cannot_be_taken_out(random_model, form, groups, message):
    with pytest.raises(UserError, match=message):
        pruning.prune(random_model(**form), groups)


@pytest.mark.parametrize("sizes", [[1], [1, 3], [0, 1], [True, 1], [1.0, 1]])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(
        UserError, match="n_kv_heads_per_layer is .*; it must list 2 numbers from 1 to 2"
    ):
        ThinkerConfig(vocab_size=9, n_layers=2, n_kv_heads=2, n_kv_heads_per_layer=sizes)


@pytest.mark.parametrize("form", ["mha", "biases everywhere", "learned positions, no gate"])
def test_fewer_neurons_equal_the_masked_model(random_model, form):
    model = random_model(**FORMS[form])
    kept = torch.ones(model.config.d_ff, dtype=torch.bool)
    kept[torch.arange(5, model.config.d_ff, 3)] = False
    left = pruning.prune_neurons(model, [kept.nonzero()[:, 0]] * 2)
    with model.patch({"blocks.*.mlp.hidden": lambda x: x * kept}):
        known = model(TOKENS)
    torch.testing.assert_close(left(TOKENS), known, rtol=0, atol=1e-4)
    assert left.config.d_ff == int(kept.sum())


def test_a_norm_over_all_heads_keeps_them(random_model):
    model = random_model(qk_norm_type="rmsnorm_width")
    with pytest.raises(UserError, match="read all heads at once"):
        pruning.prune(model, [(0, 1)])


@torch.no_grad()
@pytest.mark.parametrize("mlp", ["swiglu", "ungated"])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_neurons_that_are_zero_add_nothing(random_model, mlp, mlp_bias):
    model = random_model(mlp=mlp, mlp_bias=mlp_bias)
    before = model(TOKENS)
    neurons = torch.arange(7, model.config.d_ff)
    for block in model.blocks:
        block.mlp.up_proj.weight[0] = 0  # a bias alone makes this neuron count
        zeros.set_neurons_to_zero(block, neurons)
        assert int(zeros.zero_neurons(block).sum()) == len(neurons) + (not mlp_bias)
    known = model(TOKENS)
    left, words = zeros.remove_zeros(model)
    assert left.config.d_ff == 6 + mlp_bias
    assert "neurons in each layer" in words[0]
    torch.testing.assert_close(left(TOKENS), known, rtol=0, atol=1e-4)
    assert not torch.allclose(before, known)
