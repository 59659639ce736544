"""A sink cache against full passes that keep everything, masked by the window and the sinks."""

import copy

import pytest
import torch
from cache_contract import fed
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.generation.caches.sink_cache import SinkCache
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model.attention_dispatch import AttentionMask, attention_weights
from thinker.model.positions import apply_rotary_emb
from thinker.runtime.errors import UserError

KV_HEADS = st.sampled_from([4, 2, 1])  # multi-head, grouped, multi-query


def draw_tokens(rows, length, seed=0):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def full_pass(model, tokens, mix):
    """The Thinker's own modules on whole sequences; mix(attention, x) -> (B, H, T, D) is what
    differs."""
    x = model.embedding(tokens)
    for block in model.blocks:
        mixed = mix(block.attention, block.attention_norm(x))
        x = x + block.attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    return model.lm_head(model.norm(x))


@torch.no_grad()
def in_a_window(model, tokens, window):
    """Logits where each query sees the `window` newest keys at most: one full pass under a mask."""
    at = torch.arange(tokens.shape[1])
    rope = model.rope(at, len(at), torch.float32)

    def mix(attention, x):
        q, k, v = attention.project(x, rope)
        weights = attention_weights(
            q, k, AttentionMask((at <= at[:, None]) & (at[:, None] - at < window))
        )
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    return full_pass(model, tokens, mix)


@torch.no_grad()
def with_sinks(model, tokens, window, sinks):
    """The same with sinks, from queries and keys that nobody has turned yet, each pair at the
    distance it is due."""
    length = tokens.shape[1]
    at = torch.arange(length)
    unturned = torch.ones(length, 1), torch.zeros(length, 1)
    turned = model.rope(at, length, torch.float32)
    turned_nearer = model.rope(at.clamp_max(sinks + window - 1), length, torch.float32)
    seen = [
        [i <= t and (i < sinks or i > t - window) for i in range(length)] for t in range(length)
    ]

    def mix(attention, x):
        q, k, v = attention.project(x, unturned)
        k, v = (
            heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)
            for heads in (apply_rotary_emb(k, turned), v)
        )
        far, near = (
            apply_rotary_emb(q, turn) @ k.transpose(-2, -1) for turn in (turned, turned_nearer)
        )  # (B, H, T, T)
        scores = torch.where(at < sinks, near, far) * attention.head_dim**-0.5
        return scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(dim=-1) @ v

    return full_pass(model, tokens, mix)


def assert_close(ours, known):
    torch.testing.assert_close(ours, known, rtol=0, atol=1e-5)


@given(
    window=st.integers(1, 9),
    times=st.floats(0.5, 5),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    n_kv_heads=KV_HEADS,
    batch=st.sampled_from([1, 3]),
    qk_norm=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(20), deadline=None)
def test_without_sinks_logits_equal_a_full_pass_in_a_window(
    random_model, window, times, chunks, n_kv_heads, batch, qk_norm, seed
):
    model = random_model(seed, n_kv_heads=n_kv_heads, qk_norm=qk_norm)
    tokens = draw_tokens(batch, int(window * times) + 1, seed)
    logits = fed(model, SinkCache(model, batch, window), tokens, chunks)
    assert_close(logits, in_a_window(model, tokens, window))


@given(
    window=st.integers(1, 7),
    sinks=st.integers(1, 5),
    times=st.floats(0.5, 5),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    n_kv_heads=KV_HEADS,
    batch=st.sampled_from([1, 3]),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(20), deadline=None)
def test_sinks_are_seen_from_as_near_as_the_cache_reaches(
    random_model, window, sinks, times, chunks, n_kv_heads, batch, seed
):
    model = random_model(seed, n_kv_heads=n_kv_heads)
    tokens = draw_tokens(batch, int((sinks + window) * times) + 1, seed)
    logits = fed(model, SinkCache(model, batch, window, sinks), tokens, chunks)
    assert_close(logits, with_sinks(model, tokens, window, sinks))


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 23])
def test_every_chunk_size_gives_the_same(random_model, sinks, size):
    model = random_model()
    tokens = draw_tokens(2, 23)
    logits = fed(model, SinkCache(model, 2, 4, sinks), tokens, [size])
    assert_close(logits, with_sinks(model, tokens, 4, sinks))


def test_the_two_references_agree_and_both_differ_from_full_attention(random_model):
    model = random_model()
    tokens = draw_tokens(1, 15)
    with torch.no_grad():
        full = model(tokens)
    assert_close(in_a_window(model, tokens, 5), with_sinks(model, tokens, 5, 0))
    assert_close(in_a_window(model, tokens, 15), full)
    assert_close(with_sinks(model, tokens, 12, 3), full)
    for forgetful in (in_a_window(model, tokens, 14), with_sinks(model, tokens, 12, 2)):
        assert_close(forgetful[:, :14], full[:, :14])
        assert (forgetful[:, 14] - full[:, 14]).abs().max() > 1e-3


def test_a_window_as_long_as_the_text_is_full_attention(random_model):
    model = random_model()
    tokens = draw_tokens(2, 16)
    with torch.no_grad():
        full = model(tokens)
    for window, sinks in [(16, 0), (30, 0), (12, 4), (1, 15), (3, 40)]:
        assert_close(fed(model, SinkCache(model, 2, window, sinks), tokens, [5, 1]), full)


@given(
    window=st.integers(1, 5),
    sinks=st.integers(0, 3),
    groups=st.lists(
        st.tuples(st.integers(1, 3) | st.integers(1, 20), st.integers(1, 2)), min_size=2, max_size=4
    ),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    steps=st.integers(1, 9),
    n_kv_heads=KV_HEADS,
    data=st.data(),
)
@settings(max_examples=examples(15), deadline=None)
def test_rows_read_alone_and_put_together_go_on_as_if_alone(
    random_model, window, sinks, groups, chunks, steps, n_kv_heads, data
):
    """Some rows have rolled over and others not, or not even past the sinks, or do so while they
    are decoded."""
    model = random_model(n_kv_heads=n_kv_heads)
    lengths = [length for length, rows in groups for _ in range(rows)]
    tokens = draw_tokens(len(lengths), max(lengths) + 2 * steps)
    known = with_sinks(model, tokens, window, sinks)
    cache = None
    for length, rows in groups:
        part = SinkCache(model, rows, window, sinks)
        first = 0 if cache is None else len(cache.lengths)
        logits = fed(model, part, tokens[first : first + rows, :length], chunks)
        assert_close(logits, known[first : first + rows, :length])
        if cache is None:
            cache = part
        else:
            cache.concat_rows(part)
    assert cache.lengths == lengths

    def decode(rows):
        """One token at a time into each of these rows."""
        for _ in range(steps):
            at = torch.tensor(cache.lengths)
            assert_close(model(tokens[rows, at][:, None], cache=cache)[:, 0], known[rows, at])

    rows = list(range(len(lengths)))
    decode(rows)
    rows = data.draw(
        st.lists(st.sampled_from(rows), min_size=1, max_size=4), label="rows that stay"
    )
    cache.select(rows)
    assert cache.lengths == [lengths[row] + steps for row in rows]
    decode(rows)


def test_even_rows_again_take_chunks_after_the_uneven_ones_left(random_model):
    model = random_model()
    tokens = draw_tokens(2, 24)
    cache = SinkCache(model, 1, 5, 2)
    other = SinkCache(model, 1, 5, 2)
    model(tokens[:1, :4], cache=cache)
    model(tokens[1:, :11], cache=other)
    cache.concat_rows(other)
    model(tokens[[0, 1], [4, 11]][:, None], cache=cache)
    cache.select([1])
    assert_close(model(tokens[1:, 12:], cache=cache), with_sinks(model, tokens[1:], 5, 2)[:, 12:])


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_form_for_decoding_rolls_alike(random_model, sinks):
    model = random_model()
    tokens = draw_tokens(2, 20)
    snapshot = fuse_for_inference(model)
    logits = fed(snapshot, SinkCache(snapshot, 2, 4, sinks), tokens, [6, 1, 1, 2])
    assert_close(logits, with_sinks(model, tokens, 4, sinks))


def test_bf16_rolls_in_bf16(random_model):
    model = fuse_for_inference(random_model(), torch.bfloat16)
    cache = SinkCache(model, 1, 4, 2)
    logits = fed(model, cache, draw_tokens(1, 20), [7, 1])
    assert logits.dtype == cache.layers[0].keys.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_memory_does_not_grow(random_model):
    model = random_model()
    cache = SinkCache(model, 2, 6, 2)
    size = cache.nbytes
    # Layers, rows, KV heads, keys and values of all slots (one is never read) and the sinks' keys,
    # head_dim, fp32.
    assert size == 2 * 2 * 2 * (2 * (6 + 2 + 1) + 2) * 8 * 4
    for tokens in draw_tokens(2, 90).split([3, 5, 1, 1, 20, 60], dim=1):
        model(tokens, cache=cache)
        assert cache.nbytes == size
        assert all(layer.keys.shape[2] == layer.values.shape[2] == 9 for layer in cache.layers)
    assert cache.lengths == [90, 90]


@pytest.mark.parametrize("sinks", [0, 2])
def test_rewinds_while_nothing_is_forgotten(random_model, sinks):
    model = random_model()
    tokens, other = draw_tokens(2, 20), draw_tokens(2, 20, seed=1)
    cache = SinkCache(model, 2, 8 - sinks, sinks)
    model(torch.cat((tokens[:, :5], other[:, :3]), dim=1), cache=cache)  # full to the last slot
    cache.truncate([5, 5])
    known = with_sinks(model, tokens, 8 - sinks, sinks)
    assert_close(model(tokens[:, 5:], cache=cache), known[:, 5:])


@pytest.mark.parametrize("sinks", [0, 2])
def test_rows_rewound_to_unequal_lengths_go_on_as_if_alone(random_model, sinks):
    model = random_model()
    tokens = draw_tokens(3, 20)
    cache = SinkCache(model, 3, 8 - sinks, sinks)
    model(tokens[:, :8], cache=cache)
    cache.truncate([1, 8, 4])
    known = with_sinks(model, tokens, 8 - sinks, sinks)
    for step in range(12):
        at = torch.tensor([1, 8, 4]) + step
        assert_close(model(tokens[range(3), at][:, None], cache=cache)[:, 0], known[range(3), at])


def test_does_not_rewind_once_something_is_forgotten(random_model):
    model = random_model()
    cache = SinkCache(model, 1, 6, 2)
    model(draw_tokens(1, 9), cache=cache)
    with pytest.raises(UserError, match="cannot restore evicted positions"):
        cache.truncate([8])
    assert cache.lengths == [9]
    cache.truncate([9])  # nowhere
    cache = SinkCache(model, 1, 6)
    model(draw_tokens(1, 3), cache=cache)
    with pytest.raises(UserError, match="cannot truncate a row of 3"):
        cache.truncate([4])


def test_what_it_cannot_do_is_refused_and_changes_nothing(random_model):
    model = random_model()
    cache = SinkCache(model, 2, 4)
    model(draw_tokens(2, 3), cache=cache)
    with pytest.raises(UserError, match="2 rows"):
        model(draw_tokens(3, 1), cache=cache)
    cache.truncate([3, 1])
    before = copy.deepcopy(cache.layers)
    with pytest.raises(UserError, match="append 1 position at a time"):
        model(draw_tokens(2, 2), cache=cache)
    assert cache.lengths == [3, 1]
    assert all(
        torch.equal(new.keys, old.keys) for new, old in zip(cache.layers, before, strict=True)
    )


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    window=st.integers(1, 9),
    sinks=st.integers(0, 4),
    seed=st.integers(0, 5),
)
@settings(max_examples=10, deadline=None)
def test_slots_that_no_row_has_reached_do_not_matter(random_model, lengths, window, sinks, seed):
    model = random_model()
    tokens = draw_tokens(len(lengths), 9, seed)
    cache = None
    for row, length in enumerate(lengths):
        part = SinkCache(model, 1, window, sinks)
        model(tokens[row : row + 1, :length], cache=part)
        if cache is None:
            cache = part
        else:
            cache.concat_rows(part)
    littered = copy.deepcopy(cache)
    generator = torch.Generator().manual_seed(seed)
    for layer in littered.layers:
        for held in (layer.keys, layer.values):
            for row, length in enumerate(lengths):
                empty = held[row, :, min(length, cache.max_len) :]
                empty.copy_(1e4 * torch.randn(empty.shape, generator=generator))
    for _ in range(3):
        assert torch.equal(model(tokens[:, :1], cache=littered), model(tokens[:, :1], cache=cache))
    if len(set(lengths)) == 1:
        assert torch.equal(model(tokens, cache=littered), model(tokens, cache=cache))
