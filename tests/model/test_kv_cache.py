"""What a cache gives back is what the full pass would have computed."""

import copy

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.runtime.errors import UserError


@st.composite
def splits(draw):
    """A sequence length and the sizes of the chunks it is fed in."""
    chunks = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    return sum(chunks), chunks


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("batch", [1, 3])
@given(split=splits(), seed=st.integers(0, 5))
@settings(max_examples=examples(40), deadline=None)
def test_cached_logits_equal_uncached_at_every_position(
    random_model, n_kv_heads, batch, split, seed
):
    model = random_model(seed, n_kv_heads=n_kv_heads, max_seq_len=96)
    length, chunks = split
    tokens = torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        full = model(tokens)
    cache = model.new_cache(batch, length)
    pieces = [model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 14), min_size=2, max_size=4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(40), deadline=None)
def test_rows_of_unequal_length(random_model, lengths, chunks, seed):
    """Padded prompts in one prefill, each row rewound to its own length, then further chunks of any
    size."""
    model = random_model(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, more = len(lengths), sum(chunks)
    tokens = torch.randint(0, 61, (rows, max(lengths) + more), generator=generator)
    cache = model.new_cache(rows, max(lengths) + more)
    model(tokens[:, : max(lengths)], cache=cache)
    cache.truncate(lengths)
    tails = torch.stack([tokens[row, length : length + more] for row, length in enumerate(lengths)])
    logits = torch.cat([model(chunk, cache=cache) for chunk in tails.split(chunks, dim=1)], dim=1)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(tokens[row : row + 1, : length + more])[0, length:]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=1e-5)
    assert cache.lengths == [length + more for length in lengths]


def test_select_keeps_rows(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (3, 9))
    cache = model.new_cache(3, 16)
    model(tokens[:, :6], cache=cache)
    cache.select([2, 0, 0])
    with torch.no_grad():
        full = model(tokens[[2, 0, 0]])
    torch.testing.assert_close(
        model(tokens[[2, 0, 0], 6:], cache=cache), full[:, 6:], rtol=0, atol=1e-5
    )


def test_overflow_is_refused_and_changes_nothing(random_model):
    model = random_model()
    tokens = torch.randint(0, 61, (1, 10))
    cache = model.new_cache(1, 8)
    model(tokens[:, :6], cache=cache)
    before = [layer.keys.clone() for layer in cache.layers], list(cache.lengths)
    with pytest.raises(UserError, match="8 positions and 6 are used, so 3 more do not fit"):
        model(tokens[:, 6:9], cache=cache)
    assert all(
        torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before[0], strict=True)
    )
    assert cache.lengths == before[1]
    assert model(tokens[:, 6:8], cache=cache).shape == (1, 2, 61)


def test_wrong_batch_and_wrong_rewind_are_refused(random_model):
    model = random_model()
    cache = model.new_cache(2, 8)
    with pytest.raises(UserError, match="2 rows"):
        model(torch.zeros(3, 1, dtype=torch.long), cache=cache)
    with pytest.raises(UserError, match="truncate"):
        cache.truncate([1, 0])


def test_holds_key_heads_only(random_model):
    cache = random_model(n_heads=4, n_kv_heads=1).new_cache(3, 20)
    assert len(cache.layers) == 2
    assert (
        cache.layers[0].keys.shape == cache.layers[0].values.shape == (3, 1, 20, 8)
    )  # (B, K, max_len, D)


def test_no_gradient_through_a_cache(random_model):
    model = random_model()
    logits = model(torch.zeros(1, 3, dtype=torch.long), cache=model.new_cache(1, 8))
    assert not logits.requires_grad
    assert model(torch.zeros(1, 3, dtype=torch.long)).requires_grad


def test_bf16_cache_is_bf16(random_model):
    model = random_model()
    model.activation_dtype = torch.bfloat16
    cache = model.new_cache(1, 8)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert model(torch.zeros(1, 3, dtype=torch.long), cache=cache).dtype == torch.bfloat16


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    chunk=st.sampled_from([1, 2, 5, 20]),  # 20 queries go through another kernel than a few
    history=st.sampled_from(["rewound", "extended", "selected"]),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(12), deadline=None)
def test_slots_that_no_row_has_reached_do_not_matter(random_model, lengths, chunk, history, seed):
    """Whatever lies there, the logits are the same to the last bit."""
    model = random_model(seed)
    tokens = torch.randint(0, 61, (len(lengths), 29), generator=torch.Generator().manual_seed(seed))
    if history == "extended":
        cache = model.new_cache(1, 32)
        model(tokens[:1, : lengths[0]], cache=cache)
        for row, length in enumerate(lengths[1:], start=1):
            other = model.new_cache(1, 32)
            model(tokens[row : row + 1, :length], cache=other)
            cache.concat_rows(other)
    else:
        cache = model.new_cache(len(lengths), 32)
        model(tokens[:, : max(lengths)], cache=cache)
        cache.truncate(lengths)
    if history == "selected":
        cache.select([0, *range(len(lengths))])
        tokens = tokens[[0, *range(len(lengths))]]
    littered = copy.deepcopy(cache)
    generator = torch.Generator().manual_seed(seed)
    for layer in littered.layers:
        for held in (layer.keys, layer.values):
            for row, length in enumerate(littered.lengths):
                empty = held[row, :, length:]
                empty.copy_(1e4 * torch.randn(empty.shape, generator=generator))
    for new in (tokens[:, :chunk], tokens[:, :1], tokens[:, :1]):
        assert torch.equal(model(new, cache=littered), model(new, cache=cache))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    seed=st.integers(0, 5),
)
@settings(max_examples=10, deadline=None)
def test_rows_read_alone_and_put_together_go_on_as_if_alone(random_model, lengths, chunks, seed):
    model = random_model(seed)
    tokens = torch.randint(0, 61, (len(lengths), 32), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        full = model(tokens)
    cache = None
    for row, length in enumerate(lengths):
        part = model.new_cache(1, 32)
        model(tokens[row : row + 1, :length], cache=part)
        if cache is None:
            cache = part
        else:
            cache.concat_rows(part)
    rows = torch.arange(len(lengths))[:, None]
    for chunk in chunks:
        at = torch.tensor(cache.lengths)[:, None] + torch.arange(chunk)  # (B, T)
        torch.testing.assert_close(
            model(tokens[rows, at], cache=cache), full[rows, at], rtol=0, atol=1e-5
        )
    assert cache.lengths == [length + sum(chunks) for length in lengths]
