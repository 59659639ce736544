"""Scores of parts, and removal of neurons and layers: against hooks, for every shape, and the
command."""

import json

import pytest
import torch
from conftest import ROOT, random_model, run_script

from thinker.features.pruning import pruning
from thinker.features.pruning.saliency import METHODS, score_parts
from thinker.interop import load
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = ROOT / "scripts" / "prune.py"
FORMS = {
    "gqa": {},
    "mha": {"n_kv_heads": 4},
    "tied and biased": {"tie_embeddings": True, "attention_bias": True},
    "several kinds": {"attention": ["window(4)", "full"], "n_kv_heads_per_layer": [2, 1]},
    "learned": {"positions": "learned", "qk_norm": False},
}


@pytest.fixture
def texts():
    tokens = torch.randint(61, (6, 12), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_model_without_neurons_is_the_whole_one_with_zeros(form, texts):
    model = random_model(**FORMS[form])
    d_ff = model.config.d_ff
    kept = [
        torch.randperm(d_ff, generator=torch.Generator().manual_seed(layer))[: d_ff // 3]
        for layer in (0, 1)
    ]
    left = pruning.prune_neurons(model, kept)
    assert left.config.d_ff == d_ff // 3

    def zeros(layer):
        mask = torch.zeros(d_ff).index_fill(0, kept[layer], 1.0)
        return lambda x: x * mask

    with model.patch({f"blocks.{layer}.mlp.hidden": zeros(layer) for layer in (0, 1)}):
        expected = model(texts[0])
    torch.testing.assert_close(left(texts[0]), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_model_without_layers_is_the_whole_one_without_what_they_write(texts):
    model = random_model(n_layers=4)
    left = pruning.prune_layers(model, [1, 3])
    with model.patch(
        {f"blocks.{layer}.{part}": "zero" for layer in (1, 3) for part in ("attention", "mlp")}
    ):
        torch.testing.assert_close(left(texts[0]), model(texts[0]), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="keep at least one"):
        pruning.prune_layers(model, range(4))
    with pytest.raises(UserError, match="layers of this model differ"):
        pruning.prune_layers(random_model(**FORMS["several kinds"]), [0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_parts_that_do_nothing_score_lowest(form, method, texts):
    model = random_model(**FORMS[form])
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    with torch.no_grad():
        mlp.down_proj.weight[:, 7] = 0
        attention.o_proj.weight[
            :, : attention.n_heads // attention.n_kv_heads * attention.head_dim
        ] = 0
    scores = score_parts(model, *texts, method)
    assert [len(group) for group in scores.groups] == [
        block.attention.n_kv_heads for block in model.blocks
    ]
    assert [len(each) for each in scores.neurons] == [model.config.d_ff] * 2
    assert scores.layers.shape == (2,)
    for tensor in (*scores.groups, *scores.neurons, scores.layers):
        assert tensor.isfinite().all()
        assert (tensor >= 0).all()
    if method != "random":
        assert scores.neurons[1].argmin() == 7
        assert scores.groups[1].argmin() == 0
        assert scores.neurons[1][7] == scores.groups[1][0] == 0
    again = score_parts(model, *texts, method)
    assert all(map(torch.equal, scores.neurons, again.neurons))


def test_the_gradient_is_the_derivative_of_a_gate(texts):
    """Of one sequence: the change of the loss if a part is scaled by 1 + e, divided by e."""
    model = random_model().double()
    texts = texts[0][:1], texts[1][:1]
    scores = score_parts(model, *texts, "gradient")

    def loss(name, index, scale):
        def patch(x):
            x = x.clone()
            if index is not None:
                x[..., index] *= scale
            return x

        with torch.no_grad(), model.patch({name: patch}):
            return float(model(texts[0], targets=texts[1])[0])

    for neuron in (0, 5):
        slope = (
            loss("blocks.1.mlp.hidden", neuron, 1.0001)
            - loss("blocks.1.mlp.hidden", neuron, 0.9999)
        ) / 2e-4
        assert float(scores.neurons[1][neuron]) == pytest.approx(abs(slope), rel=1e-3)


def test_the_command(tiny_run, tmp_path):
    out = tmp_path / "small"
    done = run_script(SCRIPT, tiny_run, "--neurons", 0.5, "--layers", 1, "--texts", 8, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "removed by gradient: 1 of 2 layers" in done.stdout
    model, tokenizer = load(out)
    whole, _ = load(tiny_run)
    assert (model.config.n_layers, model.config.d_ff) == (1, whole.config.d_ff // 2)
    assert tokenizer is not None
    done = run_script(
        SCRIPT,
        tiny_run,
        "--neurons",
        0.5,
        "--by",
        "random",
        "--seed",
        3,
        "--json",
        "--out",
        tmp_path / "b",
    )
    result = json.loads(done.stdout)
    assert result["after"]["parameters"] < result["before"]["parameters"]
    assert result["after"]["loss"] > result["before"]["loss"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing would be removed; set --neurons, --heads, --layers, --weights or --zeros"),
        (["--neurons", 1], "--neurons is 1; use a fraction of at least 0 and below 1"),
        (["--layers", 2], "keep at least one"),
        (["--heads", 0.3], "--heads 0.3 removes none of 1 KV heads; raise it"),
        (["--neurons", 0.5, "--seed", 1], "--seed has no effect without --by random"),
    ],
)
def test_mistakes_are_one_line(tiny_run, tmp_path, flags, message):
    done = run_script(SCRIPT, tiny_run, "--out", tmp_path / "out", *flags)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
