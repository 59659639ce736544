"""Weights and parts set to zero: the scores against their definitions, the shares, and models
without their zeros."""

import json

import pytest
import torch
from conftest import ROOT, random_model, run_script
from installed import NAMES

from thinker.features.pruning import weight_pruning, zeros
from thinker.features.pruning.saliency import METHODS
from thinker.interop import load
from thinker.interop.hf_config import hf_model_type
from thinker.model.layers import Linear

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = ROOT / "scripts" / "prune.py"
FORMS = {
    "gqa": {},
    "mha": {"n_kv_heads": 4},
    "tied and biased": {"tie_embeddings": True, "attention_bias": True},
    "several kinds": {"attention": ["window(4)", "linear(8)"], "n_kv_heads_per_layer": [2, 1]},
    "sinks": {"attention_sinks": True, "qk_norm": False},
}


@pytest.fixture
def texts():
    tokens = torch.randint(61, (500, 12), generator=torch.Generator().manual_seed(0))  # two batches
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_what_they_are_defined_as(form, texts):
    model = random_model(**FORMS[form])
    matrices = {
        name: module for name, module in model.named_modules() if isinstance(module, Linear)
    }
    del matrices["lm_head"]
    squares = {}

    def add_squares(module, inputs):
        total = inputs[0].detach().double().square().flatten(0, 1).sum(0)
        squares[module] = squares.get(module, 0) + total

    hooks = [module.register_forward_pre_hook(add_squares) for module in matrices.values()]
    model(texts[0], targets=texts[1])[0].backward()
    for each in hooks:
        each.remove()
    expected = {
        "magnitude": {name: module.weight.abs() for name, module in matrices.items()},
        "activation": {
            name: module.weight.abs() * squares[module].sqrt() for name, module in matrices.items()
        },
        "gradient": {
            name: (module.weight * module.weight.grad).abs() for name, module in matrices.items()
        },
    }
    for method, by_name in expected.items():
        scores = weight_pruning.score_weights(model, *texts, method)
        assert scores.keys() == matrices.keys()
        for name, score in scores.items():
            torch.testing.assert_close(score, by_name[name].detach().float(), rtol=2e-3, atol=1e-3)
    one, other = (weight_pruning.score_weights(model, *texts, "random", seed) for seed in (1, 2))
    assert not torch.equal(one["blocks.0.mlp.up_proj"], other["blocks.0.mlp.up_proj"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_the_lowest_become_zero_and_zeros_only_grow(form, method, texts):
    model, by_row = random_model(**FORMS[form]), method == "activation"
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    old = {name: torch.zeros(0) for name in weight_pruning.block_matrices(model)}
    for share in (0.25, 0.5, 0.3):  # a smaller share changes nothing
        scores = weight_pruning.score_weights(model, *texts, method)
        weight_pruning.zero_weights(model, scores, share, by_row)
        for name, matrix in weight_pruning.block_matrices(model).items():
            is_zero, n_in = matrix.weight == 0, matrix.in_features
            if by_row:
                assert (
                    is_zero.sum(1) == round(max(share, 0.5 if share == 0.3 else 0) * n_in)
                ).all()
            else:
                assert int(is_zero.sum()) == round(
                    max(share, 0.5 if share == 0.3 else 0) * is_zero.numel()
                )
                if share == 0.25:
                    assert scores[name][is_zero].max() <= scores[name][~is_zero].min()
            assert is_zero[old[name]].all() if share > 0.25 else True
            assert torch.equal(matrix.weight[~is_zero], before[f"{name}.weight"][~is_zero])
            old[name] = is_zero
    assert torch.equal(model.embedding.weight, before["embedding.weight"])
    assert weight_pruning.zero_share(model) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", [(3, 5), (0, 7), (4, 4)], ids=str)
@torch.no_grad()
def test_a_model_without_its_zeros_computes_the_same(form, counts, texts):
    model = random_model(**FORMS[form])
    for layer, block in enumerate(model.blocks):
        zeros.set_neurons_to_zero(block, torch.randperm(model.config.d_ff)[: counts[layer]])
    zeros.set_groups_to_zero(model.blocks[0], torch.tensor([1]))
    expected, whole = model(texts[0][:4]), model.config
    smaller, words = zeros.remove_zeros(model)
    torch.testing.assert_close(smaller(texts[0][:4]), expected, rtol=1e-4, atol=1e-4)
    assert smaller.config.d_ff == whole.d_ff - min(counts)
    assert smaller.blocks[0].attention.n_kv_heads == whole.head_counts(0)[1] - 1
    assert len(words) == 1 + bool(min(counts))


@torch.no_grad()
def test_neurons_are_zero_by_any_of_their_matrices_and_a_group_stays():
    model = random_model()
    mlp = model.blocks[0].mlp
    mlp.gate_proj.weight[1] = mlp.up_proj.weight[2] = mlp.down_proj.weight[:, 3] = 0
    assert zeros.zero_neurons(model.blocks[0]).nonzero()[:, 0].tolist() == [1, 2, 3]
    zeros.set_groups_to_zero(model.blocks[1], torch.tensor([0, 1]))
    tokens = torch.arange(10)[None]
    smaller, words = zeros.remove_zeros(model)
    assert words == [
        "1 of 4 KV heads (0, 1 by layer)"
    ]  # layer 1 has neurons, layer 1 keeps a group
    torch.testing.assert_close(smaller(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    zeros.set_groups_to_zero(model.blocks[0], torch.tensor([1]))
    assert hf_model_type(zeros.remove_zeros(model)[0].config) == "qwen3"


def test_the_command_sets_weights_to_zero(tiny_run, tmp_path):
    losses = {}
    for method in ("activation", "random"):
        out = tmp_path / method
        done = run_script(
            SCRIPT, tiny_run, "--weights", 0.5, "--by", method, "--texts", 8, "--json", "--out", out
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["removed"] == ["50.0% of the weights in the blocks, which are zero now"]
        assert result["before"]["parameters"] == result["after"]["parameters"]
        assert weight_pruning.zero_share(load(out)[0]) == 0.5
        losses[method] = result["after"]["loss"] - result["before"]["loss"]
    assert losses["activation"] < losses["random"]
    out = tmp_path / "both"
    done = run_script(
        SCRIPT, tiny_run, "--weights", 0.5, "--neurons", 0.5, "--texts", 8, "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert "64 of 128 neurons in each layer, 50.0% of the weights in the blocks" in done.stdout
    assert f"run.init_from={out}" in done.stderr
    assert "train.prune.weights=0.5" in done.stderr
    has_teacher = f"train.distill.teacher={tiny_run}" in done.stderr
    assert has_teacher == ("distillation" in NAMES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights", 1e-6], "--weights 1e-06 sets no weight to zero (0.0% are zero); raise it"),
        (["--neurons", 1e-6], "--neurons 1e-06 removes none of"),
        (["--weights", 1], "--weights is 1; use a fraction of at least 0 and below 1"),
        (["--zeros", "--weights", 0.5], "--zeros removes only what is zero; leave out"),
        (["--zeros", "--by", "magnitude"], "--zeros removes only what is zero; leave out"),
        (["--zeros", "--seed", 1], "--seed has no effect without --by random"),
        (["--zeros"], "has no KV heads or neurons that are zero; train with train.prune first"),
    ],
)
def test_mistakes_are_one_line(tiny_run, tmp_path, flags, message):
    done = run_script(SCRIPT, tiny_run, "--out", tmp_path / "out", *flags)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
