"""Worked examples with known answers, and the fast kernel against the readable reference."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_dispatch import AttentionMask, attend, attention_weights
from thinker.model.positions import Rope, apply_rotary_emb

EXAMPLES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "attention_examples.json").read_text()
)


def heads(rows):
    return torch.tensor(rows, dtype=torch.float32)[None, None]  # (1, 1, T, D)


def triangle(length):
    at = torch.arange(length)
    return AttentionMask(at <= at[:, None])


def close(ours, known):
    torch.testing.assert_close(ours, torch.tensor(known, dtype=torch.float32), rtol=0, atol=6e-5)


def test_sat_attends():
    example = EXAMPLES["sat_attends"]
    q, k = heads([example["q"]]), heads(list(example["keys"].values()))
    close((q @ k.transpose(-2, -1))[0, 0, 0], example["scores"])
    close((q @ k.transpose(-2, -1))[0, 0, 0] / math.sqrt(2), example["scaled_by_sqrt2"])
    close(attention_weights(q, k)[0, 0, 0], example["weights_bidirectional"])
    close(attention_weights(q, k[:, :, :3])[0, 0, 0], example["weights_causal_first_three"])


@pytest.mark.parametrize(
    ("name", "scale"), [("causal_unscaled", 1.0), ("causal_scaled_sqrt2", None)]
)
def test_three_tokens(name, scale):
    example = EXAMPLES["three_tokens"]
    x, v, known = heads(example["X"]), heads(example["V"]), example[name]
    close((x @ x.transpose(-2, -1))[0, 0], example["scores"])
    weights = attention_weights(x, x, triangle(3), scale)
    close(weights[0, 0], known["weights"])
    close((weights @ v)[0, 0], known["output"])
    stretched = x * math.sqrt(
        math.sqrt(2) * (scale or 1 / math.sqrt(2))
    )  # attend() scales by 1/√2 itself
    close(attend(stretched, stretched, v, AttentionMask(is_causal=True))[0, 0], known["output"])
    close(attend(stretched, stretched, v, triangle(3))[0, 0], known["output"])
    if "entropy_per_row" in known:
        rows = weights[0, 0]
        close(-torch.xlogy(rows, rows).sum(-1), known["entropy_per_row"])
        distances = (torch.arange(3)[:, None] - torch.arange(3)).float()
        close((rows * distances).sum(-1), known["mean_distance_per_row"])
        close(rows.diagonal(-1).mean(), known["previous_token_score"])


def test_four_words():
    example = EXAMPLES["four_words"]
    x = heads(example["X"])
    close(attention_weights(x, x)[0, 0], example["full"])
    rows = attention_weights(x, x, triangle(4))[0, 0]
    close(rows, example["causal"])
    at = torch.arange(4.0)
    close((rows * (at[:, None] - at)).sum(-1), example["causal_mean_distance_per_row"])
    close((rows * at).sum(-1), example["not_to_be_confused_with_mean_position"])


@pytest.mark.parametrize(("name", "scale"), [("unscaled", 1.0), ("scaled_sqrt2", None)])
def test_two_by_two(name, scale):
    example = EXAMPLES["two_by_two"]
    weights = attention_weights(heads(example["Q"]), heads(example["K"]), scale=scale)
    close(weights[0, 0], example[name]["weights"])
    close((weights @ heads(example["V"]))[0, 0], example[name]["output"])
    if scale is None:
        close(attend(*(heads(example[key]) for key in "QKV"))[0, 0], example[name]["output"])


def test_rope():
    example = EXAMPLES["rope"]
    rope = Rope(2, example["theta"])
    for name, known in example["dot_products"].items():
        turned = [
            apply_rotary_emb(
                heads([example["unit_vector"]]), rope(torch.tensor([int(at)]), 9, torch.float32)
            )
            for at in name.split("_")[1:]
        ]
        close((turned[0] * turned[1]).sum(), known)


def test_memory():
    example = EXAMPLES["memory"]
    for name, known in example["kv_cache_fp32_bytes_per_token_per_layer_d256_head64"].items():
        config = ThinkerConfig(
            vocab_size=8, d_model=256, n_layers=3, n_heads=4, n_kv_heads=int(name.split("_")[1][0])
        )
        cache = Thinker(config).new_cache(1, 10)
        assert cache.nbytes // (10 * 3) == known
    for name, known in example["attention_parameters_d256"].items():
        kv_heads = int(name.split("_")[1][0])
        model = Thinker(
            ThinkerConfig(vocab_size=8, d_model=256, n_heads=4, n_kv_heads=kv_heads, qk_norm=False)
        )
        assert sum(p.numel() for p in model.blocks[0].attention.parameters()) == known


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    length=st.integers(1, 20),
    earlier=st.integers(0, 20),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(60), deadline=None)
def test_kernel_equals_reference(kv_heads, length, earlier, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, length, 8, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, earlier + length, 8, generator=generator)
    mask = AttentionMask(
        torch.arange(earlier + length) <= torch.arange(earlier, earlier + length)[:, None]
    )
    reference = attention_weights(q, k, mask) @ v.repeat_interleave(4 // kv_heads, dim=1)
    torch.testing.assert_close(attend(q, k, v, mask), reference, rtol=0, atol=1e-5)
    if earlier == 0:
        torch.testing.assert_close(
            attend(q, k, v, AttentionMask(is_causal=True)), reference, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@given(
    columns=st.booleans(),
    mask_kind=st.sampled_from(
        ["none", "all rows alike", "each row its own", "broadcast over queries"]
    ),
    scale=st.sampled_from([None, 0.0, 0.3, 1.0]),
    slots=st.integers(1, 40),
    wider=st.sampled_from([0, 8]),
    seed=st.integers(0, 100),
)
@settings(max_examples=5, deadline=None)
def test_few_queries_equal_the_reference_and_the_kernel_under_grad(
    kv_heads, columns, mask_kind, scale, slots, wider, seed
):
    """Without gradients a few queries on a CPU take a route of their own; 17 are no longer few."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(2, kv_heads, 64, 8 + wider, generator=generator)
    if columns:
        k = k.transpose(2, 3).contiguous().transpose(2, 3)  # as the cache keeps them
    k = k[:, :, :slots]  # a part of the cache, so that rows do not follow each other in memory
    v = torch.randn(2, kv_heads, 64, 8, generator=generator)[:, :, :slots]
    for length in range(1, 18):
        # as the heads of one projection lie: (B, T, H, D)
        q = torch.randn(2, length, 4, 8 + wider, generator=generator).transpose(1, 2)
        shape = {
            "all rows alike": (length, slots),
            "each row its own": (2, 1, length, slots),
            "broadcast over queries": (2, 1, 1, slots),
        }.get(mask_kind)
        allowed = None
        if shape is not None:
            allowed = torch.rand(shape, generator=generator) < 0.5
            allowed[..., int(torch.randint(slots, (1,), generator=generator))] = (
                True  # each looks somewhere
            )
        mask = AttentionMask(allowed)
        known = attention_weights(q, k, mask, scale) @ v.repeat_interleave(4 // kv_heads, dim=1)
        before = [x.clone() for x in (q, k, v)]
        with torch.no_grad():
            few = attend(q, k, v, mask, scale)
        assert few.shape == (2, 4, length, 8)
        torch.testing.assert_close(few, known, rtol=0, atol=1e-5)
        torch.testing.assert_close(attend(q, k, v, mask, scale), few, rtol=0, atol=1e-5)
        assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))


def test_a_scale_of_zero_looks_everywhere_alike():
    q, k = torch.randn(2, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attention_weights(q, k, scale=0.0), torch.full((1, 2, 5, 5), 0.2))


def test_gradients_flow_through_few_queries():
    q, k, v = torch.randn(
        3, 1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    q.requires_grad_()
    (attend(q, k, v, triangle(5)) ** 2).sum().backward()
    ours, q.grad = q.grad, None
    scores = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(~triangle(5).allowed, -torch.inf)
    ((scores.softmax(dim=-1) @ v) ** 2).sum().backward()
    torch.testing.assert_close(ours, q.grad)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_compiles_where_every_size_is_a_symbol(kv_heads):
    q = torch.randn(
        1, 4, 1, 8, dtype=torch.bfloat16
    )  # as a compiled decode step of a cache that grows
    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    for S in (5, 9):
        k, v = torch.randn(2, 1, kv_heads, S, 8, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
