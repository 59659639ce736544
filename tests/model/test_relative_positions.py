"""Learned relative positions: the bias of each head and distance against plain formulas, with a
cache, windows and documents, and runs that resume."""

import math

import pytest
import torch
from training_contract import check_resumes

from thinker.model import Thinker, ThinkerConfig
from thinker.model.positions import MAX_DISTANCE, N_BUCKETS, RelativeBias, distance_bucket
from thinker.runtime.errors import UserError
from thinker.training.optim.optimizers import parameter_groups

T = 150  # longer than MAX_DISTANCE


def test_buckets_are_those_of_t5():
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(2000)
    known = modeling.T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=N_BUCKETS, max_distance=MAX_DISTANCE
    )
    assert [distance_bucket(each) for each in range(2000)] == known.tolist()


def test_the_bias_has_a_number_per_head_and_bucket():
    bias = RelativeBias(3)
    assert torch.equal(bias.weight, torch.zeros(32, 3))
    torch.nn.init.normal_(bias.weight)
    distance = torch.tensor([[0, 1, 5], [15, 16, 127], [128, 5000, 10**9]])
    found = bias(distance)
    assert found.shape == (3, 3, 3)
    for place in range(9):
        t, s = divmod(place, 3)
        bucket = distance_bucket(int(distance[t, s]))
        assert torch.equal(found[:, t, s], bias.weight[bucket])
    of_batch = bias(torch.stack([distance, distance + 1])[:, None])
    assert torch.equal(of_batch[0], found)
    assert torch.equal(of_batch[1], bias(distance + 1))


def plain_weights(model, tokens, layer, visible):
    """The softmax of scores plus the bias, in double precision: visible(t, s) -> bool."""
    attention = model.blocks[layer].attention
    q, k, _ = of_layer(model, tokens, layer)
    H = attention.n_heads
    k = k.repeat_interleave(H // attention.n_kv_heads, dim=1)
    n = tokens.shape[1]
    table = model.relative_bias.weight
    weights = torch.zeros(1, H, n, n, dtype=torch.float64)
    for h in range(H):
        for t in range(n):
            keys = [s for s in range(t + 1) if visible(t, s)]
            scores = []
            for s in keys:
                score = (q[0, h, t] * k[0, h, s]).sum() / math.sqrt(attention.head_dim)
                scores.append(score + table[distance_bucket(t - s), h])
            weights[0, h, t, keys] = torch.stack(scores).softmax(0)
    return weights


def of_layer(model, tokens, layer):
    """q, k and v of a layer, (1, heads, T, D)."""
    names = [f"blocks.{layer}.attention.{each}" for each in "qkv"]
    with model.record(*names) as activations:
        model(tokens)
    return [activations[name] for name in names]


@pytest.mark.parametrize(
    ("attention", "visible"),
    [("full", lambda t, s: True), ("window(5)", lambda t, s: t - s < 5)],
    ids=["full", "window"],
)
@torch.no_grad()
def test_attention_is_the_softmax_of_scores_and_biases(random_model, attention, visible):
    model = random_model(positions="relative", attention=attention, max_seq_len=T).double()
    tokens = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(0))
    found = model.attention_weights(tokens)
    for layer in range(2):
        known = plain_weights(model, tokens, layer, visible)
        torch.testing.assert_close(found[layer].double(), known, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", ["full", "window(9)", "window(6) | global(2)", "strided(4)"])
@pytest.mark.parametrize("heads", [4, 1])
@torch.no_grad()
def test_a_cache_has_the_logits_of_the_whole_text(random_model, attention, heads):
    model = random_model(
        positions="relative", attention=attention, n_kv_heads=heads, max_seq_len=T + 10
    )
    tokens = torch.randint(61, (3, T), generator=torch.Generator().manual_seed(1))
    known = model(tokens)
    for parts in ([T], [1] * T, [70, 1, 1, 40, 38]):
        cache = model.new_cache(3, T)
        found = torch.cat([model(part, cache=cache) for part in tokens.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(found, known, rtol=0, atol=1e-4 * float(known.abs().max()))


def test_documents_do_not_see_each_other(random_model):
    model = random_model(positions="relative")
    tokens = torch.randint(61, (1, 30), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0] * 11 + [1] * 19])
    together = model(tokens, document_ids=ids)
    torch.testing.assert_close(together[:, :11], model(tokens[:, :11]), rtol=0, atol=1e-4)
    torch.testing.assert_close(together[:, 11:], model(tokens[:, 11:]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["full", "window(5)"])
def test_gradients_are_those_of_finite_differences(random_model, attention):
    """Also in a second pass of the same length, after the table has changed."""
    model = random_model(positions="relative", attention=attention, max_seq_len=T).double()
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, dims=1)
    table = model.relative_bias.weight
    step = 1e-5
    for _ in range(2):
        loss, _ = model(tokens, targets=targets)
        (gradient,) = torch.autograd.grad(loss, table)
        for bucket, head in ((0, 1), (3, 0), (17, 2)):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    table[bucket, head] += sign * step
                    values.append(float(model(tokens, targets=targets)[0]))
                    table[bucket, head] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert float(gradient[bucket, head]) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        with torch.no_grad():
            table += 0.3 * torch.randn_like(table)


def test_the_table_is_trained_as_the_norms_are():
    model = Thinker(
        ThinkerConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=4, positions="relative")
    )
    from thinker.training.config.sections import OptimizerConfig

    groups = parameter_groups(model, OptimizerConfig(lr=1, embedding_lr=2, head_lr=3, norm_lr=4))
    names = [name for name, _ in groups["norms"]["params"]]
    assert "relative_bias.weight" in names
    assert groups["norms"]["weight_decay"] == 0


@pytest.mark.parametrize("kernel", ["local", "blockwise", "flex", "varlen"])
def test_kernels_without_its_gradient_are_refused(random_model, kernel):
    model = random_model(positions="relative", attention="window(5)")
    model.kernel = kernel
    with pytest.raises(UserError, match=f"'{kernel}' does not support .*use auto"):
        model(torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    "more", [[], ["train.precision=bf16"], ["data.document_masking=true"]], ids=str
)
def test_runs_resume_to_the_same_bits(tmp_path, monkeypatch, one_thread, more):
    overrides = ["model.positions=relative", "model.attention=[window(8), full]", *more]
    whole = check_resumes(tmp_path, monkeypatch, overrides)
    from thinker.interop import load

    model, _ = load(whole)
    assert bool(model.relative_bias.weight.any())
