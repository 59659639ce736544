"""Embeddings of pairs of tokens, and for the values of attention, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import random_model
from thinker.features.pruning.model_checks import check_heads
from thinker.features.pruning.pruning import prune_layers
from thinker.model import Thinker, ThinkerConfig
from thinker.model.layers import BigramEmbedding
from thinker.runtime.errors import UserError
from thinker.training.config.sections import OptimizerConfig
from thinker.training.metrics import flops_per_token
from thinker.training.optim.optimizers import parameter_groups, resolve_learning_rates

V, B, T = 61, 2, 12
N_ROWS = 31
FORMS = {
    "value embeddings": {"value_embeddings": True},
    "pairs": {"bigram_rows": N_ROWS},
    "both": {"value_embeddings": True, "bigram_rows": N_ROWS},
}
forms = pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))


def new_model(form, **options):
    return random_model(1, 1.0, 0.2, vocab_size=V, **form, **options)


def tokens_of(seed=0, length=T):
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x):
    """RoPE of (T, D), by complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(half) / half)
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=x.dtype), angles.to(x.dtype))
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_logits(weights, config, tokens):
    """The logits of one document of ids, from parameters by name, one head after the other."""
    D, group = config.head_dim, config.n_heads // config.n_kv_heads
    x = weights["embedding.weight"][tokens]
    if config.bigram_rows:
        table = weights["bigram_embedding.table.weight"]
        pairs = [torch.zeros(config.d_model, dtype=x.dtype)]
        for before, token in zip(tokens.tolist(), tokens[1:].tolist()):
            row = (1_000_003 * before + 998_244_353 * token) % config.bigram_rows
            pairs.append(table[row])
        x = x + torch.stack(pairs)
    hidden = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1).to(x.dtype)
    for layer in range(config.n_layers):
        own = {name.removeprefix(f"blocks.{layer}."): weight for name, weight in weights.items()}
        h = rms_norm(x, own["attention_norm.weight"])
        values = h @ own["attention.v_proj.weight"].T
        if config.value_embeddings:
            values = values + weights[f"value_embeddings.tables.{layer}.weight"][tokens]
        heads = []
        for head in range(config.n_heads):
            rows = slice(head * D, (head + 1) * D)
            shared = slice(head // group * D, (head // group + 1) * D)
            q = h @ own["attention.q_proj.weight"][rows].T
            k = h @ own["attention.k_proj.weight"][shared].T
            q = rotate(rms_norm(q, own["attention.q_norm.weight"]))
            k = rotate(rms_norm(k, own["attention.k_norm.weight"]))
            heads.append((q @ k.T / D**0.5 + hidden).softmax(-1) @ values[:, shared])
        x = x + torch.cat(heads, dim=-1) @ own["attention.o_proj.weight"].T
        h = rms_norm(x, own["mlp_norm.weight"])
        gate = F.silu(h @ own["mlp.gate_proj.weight"].T)
        x = x + gate * (h @ own["mlp.up_proj.weight"].T) @ own["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


@forms
def test_loss_and_every_gradient_equal_a_plain_formula(form):
    model = new_model(form).double()
    tokens, targets = tokens_of(0), tokens_of(1)
    weights = {
        name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()
    }
    expected = 0.0
    for row, target in zip(tokens, targets):
        logits = plain_logits(weights, model.config, row)
        expected = expected + F.cross_entropy(logits, target, reduction="sum")
    total, _ = model(tokens, targets=targets)
    # The chunked loss computes its softmax in fp32.
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    total.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        largest = weights[name].grad.abs().max()
        difference = (parameter.grad - weights[name].grad).abs().max()
        assert difference <= 1e-5 * largest, name


@forms
def test_documents_of_a_row_equal_documents_alone(form):
    model = new_model(form)
    tokens = tokens_of()
    ids = torch.tensor([0] * 5 + [1] * (T - 5)).expand(B, T)
    together = model(tokens, document_ids=ids)
    alone = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), dim=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


@forms
@pytest.mark.parametrize("attention", ["full", "window(4)"])
def test_a_cache_changes_nothing(form, attention):
    """Also where rows have different lengths, and after taking tokens back."""
    model = new_model(form, attention=attention)
    tokens = tokens_of(length=30)
    whole = model(tokens)
    cache = model.new_cache(B, 30, slack=4)
    parts = [model(tokens[:, :7], cache=cache)]
    for at in range(7, 30):
        if at == 15:  # a wrong guess of three tokens, as in speculative decoding
            model(tokens_of(5, 3), cache=cache)
            cache.truncate([at, at])
        parts.append(model(tokens[:, at : at + 1], cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-4)


def test_all_pairs_with_one_token_have_rows_of_their_own():
    """As far as the table has rows; otherwise a table would know less than its size allows."""
    n = 5 * 2048
    embedding = BigramEmbedding(n, 4)
    ids = torch.arange(2048)
    for token in (0, 7, 2047):
        by_previous = embedding.rows(ids, torch.full_like(ids, token))
        by_current = embedding.rows(torch.full_like(ids, token), ids)
        for rows in (by_previous, by_current):
            assert len(rows.unique()) == len(ids)
            assert int(rows.min()) >= 0
            assert int(rows.max()) < n


def test_a_new_model_is_the_same_function_with_pairs():
    torch.manual_seed(0)
    config = {"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 4}
    model = Thinker(ThinkerConfig(**config, bigram_rows=N_ROWS))
    assert model.bigram_embedding.table.weight.abs().max() == 0
    tokens = tokens_of()
    x = model.embed(tokens, model.make_context(tokens, tokens))
    assert torch.equal(x, model.embedding(tokens))


@forms
def test_tables_train_as_the_embedding_does_and_cost_no_products(form):
    model = new_model(form)
    config = resolve_learning_rates(OptimizerConfig(), model.config, 16)
    names = [name for name, _ in parameter_groups(model, config)["embedding"]["params"]]
    tables = [
        name
        for name, _ in model.named_parameters()
        if name.startswith(("value_embeddings.", "bigram_embedding."))
    ]
    assert names == ["embedding.weight", *tables]
    assert flops_per_token(model, T) == flops_per_token(new_model({}), T)


@forms
def test_vectors_instead_of_ids_are_refused(form):
    model = new_model(form)
    with pytest.raises(UserError, match="need token ids"):
        model(embeddings=torch.zeros(B, T, model.config.d_model))


def test_layers_and_heads_with_value_embeddings_cannot_be_pruned():
    model = new_model(FORMS["value embeddings"])
    with pytest.raises(UserError, match="value embeddings"):
        prune_layers(model, [0])
    values = model.config.to_dict() | {"n_kv_heads_per_layer": [1, 2]}
    with pytest.raises(UserError, match="model.value_embeddings"):
        ThinkerConfig.from_dict(values)
    with pytest.raises(UserError, match="train.prune.heads does not work with .*value_embeddings"):
        check_heads(model.config)
    check_heads(new_model(FORMS["pairs"]).config)


@pytest.mark.parametrize("rows", [-1, 1 << 60])
def test_a_table_has_a_possible_number_of_rows(rows):
    with pytest.raises(UserError, match="model.bigram_rows"):
        ThinkerConfig(vocab_size=V, bigram_rows=rows)
