"""Causality, positions, inputs and initialisation."""

import copy
import math
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.positions import Rope, apply_rotary_emb
from thinker.runtime.errors import UserError


@given(length=st.integers(2, 30), at=st.integers(0, 29), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_changing_a_token_changes_no_logit_before_it(random_model, length, at, seed):
    at %= length
    model = random_model(seed)
    tokens = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))
    changed = tokens.clone()
    changed[0, at] = (changed[0, at] + 1) % 61
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :at], b[:, :at])
    assert not torch.equal(a[:, at], b[:, at])


class AtZero(Rope):
    """Every token stands at position 0."""

    def forward(self, positions, end, dtype):
        return super().forward(torch.zeros_like(positions), end, dtype)


def test_without_positions_a_block_is_blind_to_order(random_model):
    model = random_model(n_layers=1)
    tokens = torch.randint(0, 61, (1, 12))
    shuffled = torch.cat([tokens[:, torch.randperm(11)], tokens[:, 11:]], dim=1)
    assert not torch.equal(tokens, shuffled)
    with torch.no_grad():
        assert not torch.allclose(model(tokens)[:, -1], model(shuffled)[:, -1], atol=1e-2)
        model.rope = AtZero(model.config.head_dim, 10000.0)
        torch.testing.assert_close(model(tokens)[:, -1], model(shuffled)[:, -1], rtol=0, atol=1e-5)


@given(
    distance=st.integers(-500, 500),
    start=st.integers(500, 3000),
    shift=st.integers(0, 3000),
    theta=st.sampled_from([1.0, 100.0, 10000.0, 1e6]),
)
@settings(max_examples=60, deadline=None)
def test_rope_scores_depend_on_distance_alone(distance, start, shift, theta):
    rope = Rope(16, theta)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(distance % 7))

    def score(query_at, key_at):
        turned = [
            apply_rotary_emb(x, rope(torch.tensor([at]), at + 1, torch.float32))
            for x, at in ((q, query_at), (k, key_at))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(
        score(start + distance, start),
        score(start + distance + shift, start + shift),
        rtol=0,
        atol=1e-4,
    )


def test_shifting_all_positions_changes_no_logit(random_model):
    """The whole model: a cache whose first positions are n_evicted would not be the same, a shifted
    table is."""

    class Shifted(Rope):
        def forward(self, positions, end, dtype):
            return super().forward(positions + 1000, end + 1000, dtype)

    model = random_model()
    tokens = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        before = model(tokens)
        model.rope = Shifted(model.config.head_dim, model.config.rope_theta)
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=1e-3)


def test_rope_tables_grow_on_demand_and_are_not_saved(random_model):
    model = random_model()
    short = model.rope(torch.arange(5), 5, torch.float32)
    long = model.rope(torch.arange(5000), 5000, torch.float32)
    assert torch.equal(short[0], long[0][:5])
    assert not any("rope" in name for name in model.state_dict())


def test_embeddings_instead_of_tokens(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(embeddings=model.embedding(tokens)), model(tokens))


def test_last_only(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        last = model(tokens, last_logits_only=True)
        assert last.shape == (2, 1, 61)
        torch.testing.assert_close(last, model(tokens)[:, -1:], rtol=0, atol=1e-6)


def test_wrong_inputs_are_refused(random_model):
    model = random_model()
    tokens = torch.zeros(1, 3, dtype=torch.long)
    for arguments in ({}, {"tokens": tokens, "embeddings": torch.zeros(1, 3, 32)}, {"tokens": tokens[0]},
                      {"tokens": tokens[:, :0]}, {"embeddings": torch.zeros(3, 32)}):  # fmt: skip
        with pytest.raises(UserError):
            model(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [[1, 2]]}, "tokens is a list; it must be a tensor$"),
        (
            {"tokens": "hello"},
            r"tokens is a str; .* encode the text first: torch.tensor\(\[tokenizer",
        ),
        (
            {"tokens": torch.tensor([[5, 99_999]])},
            "token id 99999 in tokens is out of range; use 0 to 60",
        ),
        ({"tokens": torch.tensor([[-1]])}, "token id -1 in tokens is out of range"),
        ({"tokens": torch.zeros(1, 3)}, "tokens is torch.float32; it must be torch.int64"),
        (
            {"embeddings": torch.zeros(1, 3, 31)},
            r"embeddings has shape \(1, 3, 31\); use non-empty tokens .* embeddings",
        ),
        ({"embeddings": [0.0]}, "embeddings is a list"),
        (
            {"tokens": torch.zeros(1, 3, dtype=int), "targets": torch.zeros(1, 2, dtype=int)},
            r"targets is \(1, 2\); .* \(1, 3\)",
        ),
        ({"tokens": torch.zeros(1, 3, dtype=int), "targets": [1]}, r"targets is \[1\]"),
        (
            {"tokens": torch.zeros(1, 3, dtype=int), "targets": torch.full((1, 3), -100)},
            "-100 in targets is out of .*, or -1 for",
        ),
        (
            {"tokens": torch.zeros(1, 3, dtype=int), "targets": torch.full((1, 3), 10**6)},
            "id 1000000 in targets is out of range",
        ),
    ],
)
def test_what_is_no_input_is_refused_in_one_line(random_model, arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        random_model()(**arguments)
    assert "\n" not in str(caught.value)


def test_more_tokens_than_the_context_are_told(random_model):
    model, tokens = random_model(max_seq_len=8), torch.zeros(1, 9, dtype=int)
    with pytest.warns(
        UserWarning, match="9 tokens, but the model was trained with a context of 8"
    ) as told:
        model(tokens)
    assert told[0].filename == __file__
    with pytest.raises(UserError, match="9 tokens, but the model was trained with a context of 8"):
        model.attention_weights(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens[:, :8])
        random_model(max_seq_len=8, attention="window(4)")(tokens)  # has no end


def test_attention_weights_of_a_text(random_model):
    model, tokenizer = random_model(vocab_size=264), make_tokenizer("byte", [])
    tokens = torch.tensor([[tokenizer.bos_id, *tokenizer.encode("A text")]])
    assert torch.equal(
        model.attention_weights("A text", tokenizer), model.attention_weights(tokens)
    )
    assert model.attention_weights("", tokenizer).shape == (2, 1, 4, 1, 1)
    for wrong, message in (
        ("A text", r"attention_weights\(text, tokenizer\)"),
        ([1, 2], "tokens is a list"),
    ):
        with pytest.raises(UserError, match=message):
            model.attention_weights(wrong)
    with pytest.raises(
        UserError, match="101 tokens, but the model was trained with a context of 64"
    ):
        model.attention_weights("x" * 100, tokenizer)


def test_the_head_can_be_drawn_with_a_deviation():
    torch.manual_seed(3)
    head = Thinker(ThinkerConfig(vocab_size=500, d_model=128, head_init_std=0.4)).lm_head.weight
    assert head.std().item() == pytest.approx(0.4, rel=0.03)
    assert abs(head.mean().item()) < 0.01


def test_every_matrix_can_be_drawn_alike():
    torch.manual_seed(3)
    model = Thinker(ThinkerConfig(vocab_size=500, d_model=128, n_layers=2, init="normal"))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.0005, name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


@pytest.mark.parametrize("tied", [False, True])
def test_initialisation(tied):
    torch.manual_seed(3)
    model = Thinker(
        ThinkerConfig(vocab_size=500, d_model=128, n_layers=2, n_heads=4, tie_embeddings=tied)
    )
    tokens = torch.randint(0, 500, (2, 30))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        elif name.endswith(("o_proj.weight", "down_proj.weight")) or name == "lm_head.weight":
            assert (parameter == 0).all(), name
        else:
            expected = (
                (0.02 if tied else 1.0)
                if name == "embedding.weight"
                else parameter.shape[1] ** -0.5
            )
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
    with torch.no_grad():
        x = model.embedding(tokens)
        for block in model.blocks:  # every block begins as the identity
            assert torch.equal(
                block(x, model.rope(torch.arange(30), 30, x.dtype), AttentionMask(is_causal=True)),
                x,
            )
        if not tied:
            loss, count = model(tokens, targets=tokens)
            assert (loss / count).item() == pytest.approx(math.log(500), rel=1e-6)
    again = Thinker(model.config)
    again.init_weights(torch.Generator().manual_seed(7))
    twin = Thinker(model.config)
    twin.init_weights(torch.Generator().manual_seed(7))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), twin.parameters()))


def test_dropout_acts_in_training_only(random_model):
    model = random_model(dropout=0.5)
    tokens = torch.randint(0, 61, (1, 9))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_attention_weights(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (2, 11))
    weights = model.attention_weights(tokens)
    assert weights.shape == (2, 2, 4, 11, 11)  # (layers, B, H, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, 11))
    assert (weights.triu(1) == 0).all()
    assert not model.blocks[0].attention._forward_pre_hooks
    first = model.blocks[0]
    x = first.attention_norm(model.embedding(tokens))
    rope = model.rope(torch.arange(11), 11, x.dtype)
    v = first.attention.project(x, rope)[2].repeat_interleave(2, dim=1)  # (B, H, T, D)
    seen = (weights[0] @ v).transpose(1, 2).flatten(2) @ first.attention.o_proj.weight.T
    output = first.attention(x, rope, AttentionMask(is_causal=True))
    torch.testing.assert_close(seen, output)  # they are the weights of the forward pass


def test_weights_stay_fp32_while_activations_are_bf16(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (2, 11))
    exact = model(tokens)
    model.activation_dtype = torch.bfloat16
    rough = model(tokens)
    assert rough.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert (rough.float() - exact).abs().max() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"n_heads": 6, "n_kv_heads": 4}, "use 1, 2, 3, 6"),
        ({"d_model": 30, "n_heads": 4}, "not a multiple of model.n_heads"),
        ({"d_model": 12, "n_heads": 4}, "even"),
        ({"n_layers": 0}, "from 1 to"),
        ({"dropout": 1.0}, "dropout"),
        ({"attention": "fancy"}, "unknown pattern fancy"),
        ({"head_init_std": -0.1}, "from 0 to"),
        ({"rope_theta": 10**30}, "at most"),
        ({"init": "zeros"}, "choose from: fan_in, normal"),
        ({"init": "normal", "head_init_std": 0.1}, "remove it"),
        ({"head_init_std": 0.1, "tie_embeddings": True}, "model.tie_embeddings=false"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        ThinkerConfig(vocab_size=10, **wrong)


def test_config_survives_json_and_refuses_strangers():
    config = ThinkerConfig(vocab_size=10, n_kv_heads=2)
    assert ThinkerConfig.from_dict(config.to_dict()) == config
    for wrong in (
        {"colour": 1},
        {"n_heads": "four"},
        {"n_heads": True},
        {"qk_norm": 1},
        {"d_model": 2.5},
    ):
        with pytest.raises(UserError):
            ThinkerConfig.from_dict({"vocab_size": 10, **wrong})
    with pytest.raises(UserError, match="vocab_size"):
        ThinkerConfig.from_dict({})


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi", "relative"])
def test_building_on_the_meta_device_does_not_import_torchs_compiler(positions):
    """Every command that loads a model does this; the import takes longer than all the rest of
    it."""
    config = (
        f"vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=24, positions={positions!r}"
    )
    code = f"""
import sys, torch
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.model import Thinker, ThinkerConfig
with torch.device("meta"):
    Thinker(ThinkerConfig({config}))
fuse_for_inference(Thinker(ThinkerConfig({config})))(torch.zeros(1, 8, dtype=torch.long))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "attention", ["full", "topk(3)", "retrieve(4, 1)", "window(4) | global(2)"]
)
def test_a_model_that_has_computed_something_can_be_pickled_and_copied(random_model, attention):
    model, tokens = random_model(attention=attention), torch.arange(12)[None]
    known = model(tokens)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(tokens), known)
    assert torch.equal(model(tokens), known)


@pytest.mark.parametrize("attention", ["full", "linear(8)", "window(4)", "retrieve(4, 1)"])
def test_double_precision(random_model, attention):
    model, tokens = random_model(attention=attention), torch.arange(12)[None]
    double = copy.deepcopy(model).double()
    logits = double(tokens)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), model(tokens), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(double(tokens, cache=double.new_cache()), logits)
    double(tokens, targets=tokens)[0].backward()
    assert all(parameter.grad.isfinite().all() for parameter in double.parameters())


@pytest.mark.parametrize("attention", ["full", "window(4)", "global(2)", "retrieve(4, 2)"])
def test_autocast_is_the_dtype_of_the_activations(random_model, attention):
    model = random_model(1, 0.3, 0.1, attention=attention)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    model(tokens, targets=tokens)[0].backward()
    exact = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens, targets=tokens)[0].backward()
        with torch.no_grad():
            cache = model.new_cache(2)
            parts = [model(tokens[:, start : start + 8], cache=cache) for start in (0, 8)]
            whole = model(tokens)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert 0 < (found - exact).norm() < 0.05 * exact.norm()
    assert cache.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0.05, atol=0.05)
