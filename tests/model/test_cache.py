"""What a cache gives back is what the full pass would have computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError


@st.composite
def splits(draw):
    """A sequence length and the sizes of the chunks it is fed in."""
    chunks = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    return sum(chunks), chunks


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("batch", [1, 3])
@given(split=splits(), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_cached_logits_equal_uncached_at_every_position(make_thinker, n_kv_heads, batch, split, seed):
    thinker = make_thinker(seed, n_kv_heads=n_kv_heads, max_seq_len=96)
    length, chunks = split
    tokens = torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        full = thinker(tokens)
    cache = thinker.new_cache(batch, length)
    pieces = [thinker(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 14), min_size=2, max_size=4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_rows_of_unequal_length(make_thinker, lengths, chunks, seed):
    """Padded prompts in one prefill, each row rewound to its own length, then further chunks of any size."""
    thinker = make_thinker(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, more = len(lengths), sum(chunks)
    tokens = torch.randint(0, 61, (rows, max(lengths) + more), generator=generator)
    cache = thinker.new_cache(rows, max(lengths) + more)
    thinker(tokens[:, : max(lengths)], cache=cache)
    cache.rewind(lengths)
    tails = torch.stack([tokens[row, length : length + more] for row, length in enumerate(lengths)])
    logits = torch.cat([thinker(chunk, cache=cache) for chunk in tails.split(chunks, dim=1)], dim=1)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = thinker(tokens[row : row + 1, : length + more])[0, length:]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-5)
    assert cache.lengths == [length + more for length in lengths]


def test_select_keeps_rows(make_thinker):
    thinker = make_thinker()
    tokens = torch.randint(0, 61, (3, 9))
    cache = thinker.new_cache(3, 16)
    thinker(tokens[:, :6], cache=cache)
    cache.select([2, 0, 0])
    with torch.no_grad():
        full = thinker(tokens[[2, 0, 0]])
    torch.testing.assert_close(thinker(tokens[[2, 0, 0], 6:], cache=cache), full[:, 6:], rtol=0, atol=1e-5)


def test_overflow_is_refused_and_changes_nothing(make_thinker):
    thinker = make_thinker()
    tokens = torch.randint(0, 61, (1, 10))
    cache = thinker.new_cache(1, 8)
    thinker(tokens[:, :6], cache=cache)
    before = [layer.keys.clone() for layer in cache.layers], list(cache.lengths)
    with pytest.raises(UserError, match="8 positions, 6 are taken: 3 more do not fit"):
        thinker(tokens[:, 6:9], cache=cache)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before[0], strict=True))
    assert cache.lengths == before[1]
    assert thinker(tokens[:, 6:8], cache=cache).shape == (1, 2, 61)


def test_wrong_batch_and_wrong_rewind_are_refused(make_thinker):
    thinker = make_thinker()
    cache = thinker.new_cache(2, 8)
    with pytest.raises(UserError, match="2 rows"):
        thinker(torch.zeros(3, 1, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match="rewind"):
        cache.rewind([1, 0])


def test_holds_key_heads_only(make_thinker):
    cache = make_thinker(n_heads=4, n_kv_heads=1).new_cache(3, 20)
    assert len(cache.layers) == 2
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (3, 1, 20, 8)  # (B, K, max_len, D)


def test_no_gradient_through_a_cache(make_thinker):
    thinker = make_thinker()
    logits = thinker(torch.zeros(1, 3, dtype=torch.long), cache=thinker.new_cache(1, 8))
    assert not logits.requires_grad
    assert thinker(torch.zeros(1, 3, dtype=torch.long)).requires_grad


def test_bf16_cache_is_bf16(make_thinker):
    thinker = make_thinker()
    thinker.activation_dtype = torch.bfloat16
    cache = thinker.new_cache(1, 8)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert thinker(torch.zeros(1, 3, dtype=torch.long), cache=cache).dtype == torch.bfloat16
