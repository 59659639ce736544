"""A retrieval cache against full attention, a sink cache, and itself in other chunks, batches and
orders."""

import copy

import pytest
import torch
from cache_contract import fed
from conftest import examples
from conftest import random_model as make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.features.retrieval.block_store import BlockStore, stored_bytes
from thinker.features.retrieval.retrieval_cache import RetrievalCache, context_size
from thinker.generation import Generator, SamplingParams
from thinker.generation.caches.sink_cache import SinkCache
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.model.positions import apply_rotary_emb
from thinker.runtime.errors import UserError

TOKENIZER = make_tokenizer("byte", [])


def draw_tokens(rows, length, seed=0):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(ours, known, atol=2e-5):
    torch.testing.assert_close(ours, known, rtol=0, atol=atol)


CHUNKS = st.lists(st.integers(1, 25), min_size=1, max_size=4)


@given(
    block=st.sampled_from([1, 2, 4]),
    n_blocks=st.integers(1, 3),
    sinks=st.integers(0, 3),
    chunks=CHUNKS,
    n_kv_heads=st.sampled_from([4, 2, 1]),
    batch=st.sampled_from([1, 3]),
    qk_norm=st.booleans(),
    scaling=st.sampled_from([None, {"type": "yarn", "factor": 2.0, "original_max_seq_len": 16}]),
    exact=st.booleans(),
)
@settings(max_examples=examples(20), deadline=None)
def test_with_all_blocks_retrieved_it_is_full_attention(
    random_model, block, n_blocks, sinks, chunks, n_kv_heads, batch, qk_norm, scaling, exact
):
    model = random_model(n_kv_heads=n_kv_heads, qk_norm=qk_norm, rope_scaling=scaling)
    tokens = draw_tokens(batch, 40)
    with torch.no_grad():
        full = model(tokens)
    dtype = torch.float32 if exact else torch.int8
    logits = fed(
        model,
        RetrievalCache(model, batch, n_blocks * block, sinks, 40, block, dtype),
        tokens,
        chunks,
    )
    assert_close(logits, full, 2e-5 if exact else 0.05 * full.abs().max().item())
    if not exact:
        n_window = n_blocks * block + sinks
        assert_close(logits[:, :n_window], full[:, :n_window])  # nothing was rounded yet
        assert (logits[:, -1] - full[:, -1]).abs().max() > 1e-6


@given(
    window=st.integers(1, 7),
    sinks=st.integers(0, 3),
    chunks=CHUNKS,
    n_kv_heads=st.sampled_from([4, 2, 1]),
)
@settings(max_examples=examples(10), deadline=None)
def test_with_nothing_retrieved_it_is_a_sink_cache(random_model, window, sinks, chunks, n_kv_heads):
    model = random_model(n_kv_heads=n_kv_heads)
    tokens = draw_tokens(2, 40)
    logits = fed(
        model, RetrievalCache(model, 2, window, sinks, retrieve=0, block=1), tokens, chunks
    )
    assert_close(logits, fed(model, SinkCache(model, 2, window, sinks), tokens, chunks))


@given(
    block=st.sampled_from([1, 2, 3]),
    n_blocks=st.integers(1, 3),
    sinks=st.integers(0, 3),
    retrieve=st.integers(1, 4),
    chunks=CHUNKS,
    n_kv_heads=st.sampled_from([4, 2, 1]),
    batch=st.sampled_from([1, 3]),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(20), deadline=None)
def test_chunks_equal_one_position_at_a_time(
    random_model, block, n_blocks, sinks, retrieve, chunks, n_kv_heads, batch, seed
):
    model = random_model(seed, n_kv_heads=n_kv_heads)
    tokens = draw_tokens(batch, 45, seed)
    sizes = (n_blocks * block, sinks, retrieve, block, torch.float32)
    known = fed(model, RetrievalCache(model, batch, *sizes), tokens, [1])
    assert_close(fed(model, RetrievalCache(model, batch, *sizes), tokens, chunks), known)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    sinks=st.integers(0, 3),
    retrieve=st.integers(1, 3),
    n_kv_heads=st.sampled_from([4, 2, 1]),
    data=st.data(),
)
@settings(max_examples=examples(15), deadline=None)
def test_rows_of_unequal_lengths_go_on_as_if_alone(
    random_model, lengths, sinks, retrieve, n_kv_heads, data
):
    """Some rows have stored blocks, others none, or fewer than they retrieve, or store one while
    they are decoded."""
    model = random_model(n_kv_heads=n_kv_heads)
    tokens, sizes = draw_tokens(len(lengths), 50), (4, sinks, retrieve, 2, torch.float32)
    known = fed(model, RetrievalCache(model, len(lengths), *sizes), tokens, [50])
    parts = []
    for row, length in enumerate(lengths):
        parts.append(RetrievalCache(model, 1, *sizes))
        fed(model, parts[row], tokens[row : row + 1, :length], [length])
    cache, *others = parts
    for other in others:
        cache.concat_rows(other)

    def decode(rows):
        for _ in range(7):
            at = torch.tensor(cache.lengths)
            assert_close(model(tokens[rows, at][:, None], cache=cache)[:, 0], known[rows, at])

    rows = list(range(len(lengths)))
    decode(rows)
    rows = data.draw(
        st.lists(st.sampled_from(rows), min_size=1, max_size=4), label="rows that stay"
    )
    cache.select(rows)
    decode(rows)


def test_positions_stay_within_the_context_and_texts_may_be_longer_than_rope_tables(random_model):
    """The first query beyond what all blocks hold still attends to all but one block, each at a
    position it knows."""
    model = random_model(max_seq_len=32)
    assert context_size(8, 2, 4, 4) == 29
    cache, tokens = RetrievalCache(model, 1, 8, 2, 4, 4), draw_tokens(1, 600)
    logits = fed(model, cache, tokens, [100])
    assert logits.isfinite().all()
    assert len(model.rope.table[0]) <= 64  # no position beyond the context was ever asked for


def test_a_block_with_a_key_that_the_query_seeks_is_found():
    store = BlockStore(2, 1, 8, 4, torch.device("cpu"), torch.int8)
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([0, 1])
    for block in range(50):
        keys, values = (0.1 * torch.randn(2, 1, 8, 4, generator=generator) for _ in range(2))
        if block == 33:
            keys[0, 0, 5], values[0, 0, 5] = torch.tensor([1.0, -2.0, 0.5, 1.0]), 7.0
        store.put(rows, torch.tensor([block, block]), keys, values)
    q = torch.tensor([1.0, -2.0, 0.5, 1.0]).view(1, 1, 1, 1, 4).expand(2, 1, 1, 1, 4)
    found = store.search(q, 3, 50, None)
    assert found.shape == (2, 1, 1, 3)
    assert (found.diff(dim=-1) > 0).all()
    assert 33 in found[0]
    keys, values = store.read(found, torch.float32)
    at = 8 * found[0, 0, 0].tolist().index(33) + 5
    assert_close(keys[0, 0, 0, at], q[0, 0, 0, 0], 0.01)
    assert_close(values[0, 0, 0, at], torch.full((4,), 7.0), 1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 1e6])
def test_int8_is_within_half_a_step(scale):
    store = BlockStore(1, 2, 4, 8, torch.device("cpu"), torch.int8)
    keys, values = scale * torch.randn(2, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    store.put(
        torch.tensor([0]), torch.tensor([20]), keys, values
    )  # needs more than its first capacity
    read_keys, read_values = store.read(torch.full((1, 2, 1, 1), 20), torch.float32)
    for read, exact in ((read_keys, keys), (read_values, values)):
        step = exact.abs().amax(dim=-1, keepdim=True) / 127
        assert ((read[:, :, 0] - exact).abs() <= 0.501 * step + 1e-37).all()


def test_memory_is_what_is_stated(random_model):
    model = random_model()
    cache = RetrievalCache(model, 1, 8, 2, 2, 4)
    empty = cache.nbytes
    fed(model, cache, draw_tokens(1, 8 + 2 + 64 * 4), [100])
    capacities = {layer.store.capacity for layer in cache.layers}
    assert capacities == {64}
    stated = stored_bytes(model.config, 64, 4)
    assert sum(layer.store.nbytes for layer in cache.layers) == stated
    assert cache.nbytes - empty == stated - stored_bytes(model.config, 16, 4)
    assert all(
        tensor.device.type == "cpu"
        for tensor in (cache.layers[0].store.keys, cache.layers[0].store.values)
    )


def test_truncates_only_while_nothing_was_stored(random_model):
    model = random_model()
    tokens, other = draw_tokens(2, 40), draw_tokens(2, 40, seed=1)
    cache = RetrievalCache(model, 2, 8, 2, 2, 4, torch.float32)
    known = fed(model, RetrievalCache(model, 2, 8, 2, 2, 4, torch.float32), tokens, [40])
    model(torch.cat((tokens[:, :5], other[:, :8]), dim=1), cache=cache)
    cache.truncate([5, 5])
    assert_close(model(tokens[:, 5:], cache=cache), known[:, 5:])
    assert not cache.can_truncate([39, 39])
    with pytest.raises(UserError, match="a retrieval cache cannot restore evicted positions"):
        cache.truncate([39, 39])
    assert cache.lengths == [40, 40]


def test_refusals_change_nothing(random_model):
    model = random_model()
    cache = RetrievalCache(model, 2, 4, 0, 2, 2)
    model(draw_tokens(2, 3), cache=cache)
    cache.truncate([3, 1])
    before = copy.deepcopy(cache.layers[0].keys)
    with pytest.raises(UserError, match="append 1 position at a time, not 2"):
        model(draw_tokens(2, 2), cache=cache)
    with pytest.raises(UserError, match="2 rows"):
        model(draw_tokens(3, 1), cache=cache)
    with (
        pytest.raises(
            UserError, match=r"attention.weights is not available with this kind of cache"
        ),
        model.record("blocks.*.attention.weights"),
    ):
        model(draw_tokens(2, 1), cache=cache)
    assert torch.equal(cache.layers[0].keys, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("n_kv_heads", [4, 1])
def test_generator_with_each_precision(dtype, bits, n_kv_heads):
    """Prompts of different lengths in one batch, as each alone, and scored alike; the text outgrows
    the context."""
    model = make_model(
        vocab_size=264, n_heads=4, n_kv_heads=n_kv_heads, max_seq_len=32, norm_mean=0.3
    )
    options = {
        "window": 8,
        "sinks": 2,
        "retrieve": 2,
        "retrieve_block": 4,
        "dtype": dtype,
        "bits": bits,
    }
    generator = Generator(model, TOKENIZER, **options)
    params = SamplingParams(40, seed=1, logit_bias={TOKENIZER.bos_id: -torch.inf})
    batch = generator.generate(
        ["a long prompt, longer than all of the context", "short", "a"], params
    )
    for index, completion in enumerate(batch):
        assert len(completion.token_ids) == 40
        n_read = completion.prompt_tokens + 39
        assert completion.n_evicted == (n_read - 10) // 4 * 4
        assert completion.stored_bytes == stored_bytes(model.config, completion.n_evicted // 4, 4)
        if dtype == torch.float32:
            alone = SamplingParams(40, seed=1 + index, logit_bias=dict(params.logit_bias))
            (known,) = generator.generate(completion.prompt, alone)
            assert known.token_ids == completion.token_ids
            torch.testing.assert_close(completion.logprobs, known.logprobs, rtol=0, atol=5e-3)
    plain = Generator(model, TOKENIZER, **options | {"retrieve": 0, "retrieve_block": 32})
    assert plain.score("x" * 9).nats == pytest.approx(generator.score("x" * 9).nats, rel=1e-2)
    assert plain.score("a long text " * 9).nats != pytest.approx(
        generator.score("a long text " * 9).nats, abs=1e-3
    )


def test_the_form_for_decoding_retrieves_alike(random_model):
    model = random_model()
    tokens = draw_tokens(2, 40)
    snapshot = fuse_for_inference(model)
    sizes = (4, 2, 2, 2, torch.float32)
    known = fed(model, RetrievalCache(model, 2, *sizes), tokens, [1])
    assert_close(fed(snapshot, RetrievalCache(snapshot, 2, *sizes), tokens, [9, 1]), known)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieve": 2}, "retrieve is 2; use at least 0, and only with a window"),
        ({"window": 8, "retrieve": -1}, "retrieve is -1"),
        ({"window": 8, "retrieve": 1, "retrieve_block": 3}, "a block that divides the window"),
        ({"window": 8, "retrieve": 1, "retrieve_block": 0}, "a block that divides the window"),
        ({"window": 8, "retrieve_block": 4}, "retrieve is 0"),
        (
            {"window": 8, "sinks": 2, "retrieve": 5, "retrieve_block": 4},
            r"up to 33 positions .*the trained context has 32",
        ),
        *if_installed(
            "speculation",
            (
                {"window": 8, "retrieve": 1, "retrieve_block": 4, "speculate": 2},
                "cannot be combined with speculate",
            ),
        ),
        (
            {"window": 8, "retrieve": 1, "retrieve_block": 4, "use_cache": False},
            "needs the KV cache",
        ),
        (
            {"window": 8, "retrieve": 1, "retrieve_block": 4, "cache_bits": 8},
            "cache_bits cannot be combined with a window",
        ),
        *if_installed(
            "early_exit",
            (
                {"window": 8, "retrieve": 1, "retrieve_block": 4, "early_exit": 0.5},
                "early_exit cannot be combined with window",
            ),
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    model = make_model(vocab_size=264, max_seq_len=32)
    with pytest.raises(UserError, match=message):
        Generator(model, TOKENIZER, **options)


@pytest.mark.parametrize(
    "shape", [{"positions": "alibi"}, {"attention": "window(8)"}, {"positions": "learned"}]
)
def test_models_without_plain_rope_are_refused(shape):
    model = make_model(vocab_size=264, max_seq_len=32, **shape)
    with pytest.raises(UserError, match="window needs full attention and plain RoPE"):
        Generator(model, TOKENIZER, window=8, retrieve=1, retrieve_block=4)


@torch.no_grad()
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("window", "sinks", "retrieve", "block"), [(4, 0, 1, 2), (6, 2, 2, 3), (2, 3, 3, 1)]
)
def test_each_query_equals_a_text_without_gaps(
    random_model, n_kv_heads, window, sinks, retrieve, block
):
    """One layer, each position by itself: the sinks, the best blocks and the window, numbered from
    0."""
    model = random_model(n_kv_heads=n_kv_heads, n_layers=1)
    tokens, (layer,) = draw_tokens(1, 40), model.blocks
    found = fed(
        model, RetrievalCache(model, 1, window, sinks, retrieve, block, torch.float32), tokens, [7]
    )
    x, attention = model.embedding(tokens), layer.attention
    unturned = torch.ones(40, 1), torch.zeros(40, 1)
    q, k, v = attention.project(layer.attention_norm(x), unturned)  # (1, H or K, T, D)
    G = 4 // n_kv_heads
    distance = min(window + retrieve * block, context_size(window, sinks, retrieve, block) - 1)

    def turned(heads, positions):
        return apply_rotary_emb(
            heads, model.rope(positions, int(positions.max()) + 1, torch.float32)
        )

    mixed = torch.zeros_like(q)
    for t in range(40):
        n_stored = max(0, t + 1 - sinks - window) // block
        for head in range(n_kv_heads):
            own = slice(head * G, head * G + G)
            far_q = turned(q[0, own, t], torch.full((G,), distance))
            scores = []
            for at in range(n_stored):
                keys = k[0, head, sinks + at * block :][:block]
                outliers = (keys - keys.mean(dim=0)).norm(dim=-1).topk(min(4, block)).indices
                scores.append((far_q @ keys[outliers].T).max().item() + at * 2.0**-15)
            best = sorted(sorted(range(n_stored), key=scores.__getitem__)[-retrieve:])
            kept = [*range(min(sinks, t + 1))]
            kept += [sinks + at * block + i for at in best for i in range(block)]
            kept += range(sinks + n_stored * block, t + 1)
            positions = torch.arange(len(kept))
            keys, last = turned(k[0, head, kept], positions), torch.full((G,), len(kept) - 1)
            weights = (turned(q[0, own, t], last) @ keys.T * attention.head_dim**-0.5).softmax(
                dim=-1
            )
            mixed[0, own, t] = weights @ v[0, head, kept]
    x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    x = x + layer.mlp(layer.mlp_norm(x))
    assert_close(found, model.lm_head(model.norm(x)))
