"""A cache in few bits: what it stores, and that every way of reading it computes the same."""

import copy
import math
import random

import pytest
import torch
from conftest import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from installed import if_installed

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Completion, Generator, SamplingParams
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.generation.caches.quantized_cache import (
    BLOCK,
    MAX_PER_PASS,
    QuantizedCache,
    QuantizedLayer,
    make_cache,
    pack_codes,
    quantize_vectors,
    unpack_codes,
)
from thinker.generation.chat.conversation import Conversation
from thinker.generation.decoders import native_decoder as native_decode
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.native.compiler import has_compiler
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = make_tokenizer("byte", [])
FORMS = {
    "mha": {"n_kv_heads": 4},
    "gqa": {"qk_norm": False},
    "mqa": {"n_kv_heads": 1, "head_dim": 32},
    "softcap": {"attn_logit_softcap": 5.0},
    "sinks": {"attention_sinks": True},
    "alibi": {"positions": "alibi"},
    "48 wide": {"head_dim": 48},
    "masked": {"attention": "strided(5)"},
    "window in some layers": {"attention": ["full", "window(6)"]},
}
WITHOUT_KERNELS = {"relative": {"positions": "relative"}}
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


def make_model(form, dtype=torch.float32, native=False):
    shape = {"vocab_size": 264, "d_model": 64, "max_seq_len": 128}
    model = random_model(1, 0.4, 0.25, **shape, **(FORMS | WITHOUT_KERNELS)[form])
    return fuse_for_inference(model, dtype, native=native)


def rounded(x, bits):
    codes, scale = quantize_vectors(x, bits)
    return codes.float() * scale.float()[..., None]


@settings(deadline=None)
@given(st.sampled_from([8, 4]), st.integers(0, 2**31), st.floats(-20, 20))
def test_vectors_keep_their_largest_number_and_lose_half_a_step(bits, seed, exponent):
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = quantize_vectors(x, bits)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits), codes)
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    assert (codes.min().item(), codes.max().item()) >= (lowest, lowest)
    assert codes.max() <= highest
    error = (rounded(x, bits) - x).abs()
    step = scale.float().abs()[..., None]
    is_clipped = (
        x / scale.float()[..., None] > highest + 0.5
    )  # on the other side of the largest number
    assert (error <= step * torch.where(is_clipped, 1.04, 0.51)).all()


def test_zeros_and_numbers_that_are_not_finite():
    codes, scale = quantize_vectors(torch.zeros(2, 16), 8)
    assert (codes == 0).all()
    assert (scale.float() != 0).all()
    assert not rounded(torch.tensor([[math.nan] + [1.0] * 15]), 4).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", [*FORMS, *WITHOUT_KERNELS])
@torch.no_grad()
def test_logits_are_those_of_rounded_keys_and_values(form, bits):
    """The reference rounds the keys and values of a full pass; with 4 bits, each query has the
    newest unrounded."""
    model = make_model(form)
    T = 50
    tokens = torch.randint(0, 264, (2, T), generator=torch.Generator().manual_seed(0))
    block = torch.arange(T)[:, None] // BLOCK - torch.arange(T) // BLOCK
    is_exact = (block < 2) if bits == 4 else torch.zeros(T, T, dtype=torch.bool)  # (T, S)
    layers = [
        layer
        for layer, one in enumerate(make_cache(model, 1, 128, bits=bits).layers)
        if type(one) is QuantizedLayer
    ]
    patches, outputs = {}, {}
    slopes = 2.0 ** -torch.arange(2, 10, 2)[:, None, None]  # of 4 heads
    distance = torch.arange(T) - torch.arange(T)[:, None]
    bias = 0
    if form == "alibi":
        bias = slopes * distance
    if form == "relative":
        bias = model.relative_bias(distance.abs())  # (H, T, S)
    names = [f"blocks.{layer}.attention.{point}" for layer in layers for point in "qkv"]
    for layer in layers:
        attention, name = model.blocks[layer].attention, f"blocks.{layer}.attention"

        def compute(weights, attention=attention, name=name):
            """Keep the output; which keys are visible is read from the weights of the unrounded
            pass."""
            repeats = attention.n_heads // attention.n_kv_heads
            q, k, v = (recorded[f"{name}.{point}"] for point in "qkv")
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
            scores = [q @ keys.mT * attention.head_dim**-0.5 for keys in (k, rounded(k, bits))]
            if (cap := attention.attn_logit_softcap) is not None:
                scores = [cap * (one / cap).tanh() for one in scores]
            scores = torch.where(is_exact, *scores) + bias
            scores = scores.masked_fill(weights == 0, -torch.inf)
            if attention.sinks is not None:
                sinks = attention.sinks[:, None, None].expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sinks), dim=-1)
            mixed = scores.softmax(-1)[..., :T]
            outputs[name] = (mixed * is_exact) @ v + (mixed * ~is_exact) @ rounded(v, bits)
            return weights

        patches[f"{name}.weights"] = compute
        patches[f"{name}.heads"] = lambda y, name=name: outputs[name]
    with model.record(*names) as recorded, model.patch(patches):
        known = model(tokens)
    unrounded = model(tokens)
    cache = make_cache(model, 2, T, bits=bits)
    found = torch.cat([model(tokens[:, t : t + 1], cache=cache) for t in range(T)], dim=1)
    scale = known.abs().max()
    # A number between two codes may be rounded the other way, after sums in another order.
    assert (found - known).abs().quantile(0.9) <= 1e-4 * scale
    assert (found - known).norm() <= 0.1 * (known - unrounded).norm()
    assert (known - unrounded).norm() <= (0.03 if bits == 8 else 0.4) * known.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMS), ("mha", torch.bfloat16), ("mqa", torch.bfloat16)],
)
@needs_compiler
@torch.no_grad()
def test_kernels_and_torch_read_the_same_cache_alike(form, bits, dtype):
    model = make_model(form, dtype, native=True)
    decoder, numbers = NativeDecoder(model), torch.Generator().manual_seed(0)
    ours = make_cache(model, 2, 128, bits=bits)
    for t in range(75):  # beyond the ring
        tokens, known = torch.randint(0, 264, (2, 1), generator=numbers), copy.deepcopy(ours)
        found = decoder.step(tokens, ours).float()
        if t > 1 and (t + 1) % BLOCK > 2 and t < 70:
            continue  # the ends of blocks count
        expected = model(tokens, cache=known).float()
        error = (found - expected).norm() / expected.norm()
        assert error < (2e-3 if dtype == torch.float32 else 0.05), t
        if dtype == torch.float32 and t > 0:
            layer, other = ours.layers[0], known.layers[0]
            assert (
                unpack_codes(layer.keys, bits) - unpack_codes(other.keys, bits)
            ).abs().max() <= 1
            torch.testing.assert_close(
                layer.newest_values, other.newest_values, rtol=1e-4, atol=1e-4
            )
    assert ours.lengths == [75, 75]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", ["gqa", "alibi", "masked", "window in some layers"])
@needs_compiler
@torch.no_grad()
def test_rows_of_unequal_lengths_are_read_alike(form, bits):
    """Each row has its own newest keys, also if a mask hides the end of longer rows."""
    model = make_model(form, native=True)
    decoder, numbers = NativeDecoder(model), torch.Generator().manual_seed(0)
    ours, *others = (make_cache(model, 1, 128, bits=bits) for _ in range(3))
    for cache, length in zip((ours, *others), (50, 5, 90)):
        for part in torch.randint(0, 264, (1, length), generator=numbers).split(BLOCK, dim=1):
            model(part, cache=cache)
    for other in others:
        ours.concat_rows(other)
    for _ in range(30):
        tokens, known = torch.randint(0, 264, (3, 1), generator=numbers), copy.deepcopy(ours)
        expected = model(tokens, cache=known)
        errors = (decoder.step(tokens, ours) - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.max() < 2e-3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float32) for form in ("mha", "mqa", "softcap", "sinks", "48 wide")),
        ("gqa", torch.bfloat16),
    ],
)
@needs_compiler
@torch.no_grad()
def test_a_position_has_the_same_bits_however_it_is_read(form, bits, dtype):
    decoder = NativeDecoder(make_model(form, dtype, native=True), for_all_passes=True)
    assert decoder.is_batch_invariant
    numbers = random.Random(form)
    texts = [[numbers.randrange(264) for _ in range(n)] for n in (1, 16, 33, 100, 77)]
    alone = [
        decoder.step(torch.tensor([text]), make_cache(decoder.model, 1, 128, bits=bits))[0]
        for text in texts
    ]
    pool, n_read = make_cache(decoder.model, len(texts), 128, bits=bits), [0] * len(texts)
    while left := [row for row, text in enumerate(texts) if n_read[row] < len(text)]:
        rows, tokens = [], []
        for row in numbers.sample(left, numbers.randint(1, len(left))):
            chunk = texts[row][n_read[row] :][: numbers.choice([1, 2, 5, 40, 100])]
            rows += [row] * len(chunk)
            tokens += chunk
        for row, found in zip(rows, decoder.read(pool, rows, tokens, range(len(rows)))):
            assert torch.equal(found, alone[row][n_read[row]])
            n_read[row] += 1


@torch.no_grad()
def test_chunks_of_blocks_equal_single_positions():
    """So that --score measures what sampling sees."""
    for bits, chunk in ((8, 50), (4, BLOCK)):
        model = make_model("gqa")
        tokens = torch.randint(0, 264, (1, 100), generator=torch.Generator().manual_seed(0))
        logits = []
        for size in (1, chunk):
            cache = make_cache(model, 1, 100, bits=bits)
            logits.append(
                torch.cat([model(part, cache=cache) for part in tokens.split(size, dim=1)], dim=1)
            )
        assert (logits[0] - logits[1]).abs().quantile(0.95) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_bytes(head_dim, dtype):
    model = fuse_for_inference(random_model(head_dim=head_dim, max_seq_len=4096), dtype)
    n_vectors = 2 * 2 * 2 * 3 * 4096  # keys and values, layers, KV heads, rows, positions
    sizes = {bits: make_cache(model, 3, 4096, bits=bits).nbytes for bits in (8, 4)}
    ring = 2 * 2 * 2 * 3 * 64 * head_dim * dtype.itemsize
    assert sizes == {8: n_vectors * (head_dim + 2), 4: n_vectors * (head_dim // 2 + 2) + ring}


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_selected_joined_and_shortened(bits):
    model = make_model("gqa")
    tokens = torch.randint(0, 264, (3, 90), generator=torch.Generator().manual_seed(0))

    def after(rows, length):
        cache = make_cache(model, len(rows), 90, bits=bits)
        for t in range(length):
            logits = model(tokens[rows, t : t + 1], cache=cache)
        return logits, cache

    with torch.no_grad():
        (_, one), (_, two) = after([0, 1], 80), after([2], 80)
        one.concat_rows(two)
        one.select([2, 0])
        assert one.can_truncate([80 - MAX_PER_PASS, 80])
        one.truncate([80 - MAX_PER_PASS, 80 - MAX_PER_PASS])
        for t in range(80 - MAX_PER_PASS, 90):
            logits = model(tokens[[2, 0], t : t + 1], cache=one)
        torch.testing.assert_close(logits, after([2, 0], 90)[0], rtol=0, atol=1e-4)
    if bits == 4:
        with pytest.raises(
            UserError, match="newest positions, which are kept unrounded, have been overwritten"
        ):
            one.truncate([90 - MAX_PER_PASS - 1, 90])
    else:
        one.truncate([3, 0])


@pytest.mark.parametrize("compile", [False, None])
@pytest.mark.parametrize("bits", [8, 4])
def test_chats_and_drafts_give_the_same_text(bits, compile):
    """A chat reads only what is new, if the cache still has all that precedes it."""
    model = random_model(1, 0.4, 0.25, vocab_size=264, d_model=64, max_seq_len=256)
    params = SamplingParams(
        40, seed=1, logit_bias=dict.fromkeys(range(128, 257), -math.inf)
    )  # only ASCII
    generator = Generator(model, TOKENIZER, cache_bits=bits, compile=compile)
    for options in if_installed("speculation", {"speculate": 8}) if bits == 8 else ():
        drafted = Generator(model, TOKENIZER, cache_bits=bits, compile=compile, **options)
        (known,) = generator.generate(["abc" * 15], params)
        (found,) = drafted.generate(["abc" * 15], params)
        assert found.token_ids == known.token_ids
    conversation = Conversation(generator)
    text = "".join(conversation.reply("Hello there", params))
    again = "".join(conversation.reply(" and", params))
    (fresh,) = generator.generate([f"Hello there{text} and"], params)
    assert again == fresh.text


@needs_compiler
def test_tokens_that_the_kernels_sampled_at_once_count_as_read(monkeypatch):
    """They overwrite the newest keys, also if the text is shortened in several turns."""
    monkeypatch.setattr(native_decode, "MAX_SECONDS", 1e6)
    generator = Generator(
        random_model(vocab_size=264, d_model=64, max_seq_len=128), TOKENIZER, cache_bits=4
    )
    cache, prompt = generator.new_cache(1, 128), [1] * 50
    logits = generator.prefill([prompt], cache)
    sequence = generator.new_sequence(0, Completion(""), SamplingParams(16), prompt)
    generator.decoder.sample([sequence], cache, logits, 16)
    assert cache.lengths == [65]
    cache.truncate([45])
    assert cache.can_truncate([65 - MAX_PER_PASS])
    assert not cache.can_truncate([65 - MAX_PER_PASS - 1])


@pytest.mark.parametrize("n_rows", [1, 3])
@needs_compiler
def test_texts_share_keys_if_the_newest_are_still_unrounded(n_rows, monkeypatch):
    """As the next turn of a chat, although the kernels have read tokens beyond the stop string of
    the last one."""
    monkeypatch.setattr(native_decode, "MAX_SECONDS", 1e6)
    generator = Generator(
        random_model(1, 0.4, 0.25, vocab_size=264, max_seq_len=256, head_dim=16),
        TOKENIZER,
        cache_bits=4,
    )
    if not generator.is_batch_invariant:
        pytest.skip("needs AVX-512")
    batch, numbers, texts, lengths = ContinuousBatch(generator, n_rows), random.Random(0), [], []
    for seed in range(60):
        tokens = [numbers.randrange(256) for _ in range(numbers.choice([1, 2, 50]))]
        n_old = 0
        if seed % 20:
            old = texts[-1]
            n_cut = max(numbers.choice([0, 25]), len(old) - 130)
            n_old = max(0, len(old) - n_cut)
            tokens = old[:n_old] + tokens
        params, completion = (
            SamplingParams(numbers.choice([1, 30]), seed=seed, stop=tuple("zxypqrs")),
            Completion(""),
        )
        (known,) = generator.generate([""], [params], [tokens])
        sequence = generator.new_sequence(0, completion, params, tokens)
        batch.add(sequence)
        while not batch.is_idle:
            batch.step()
        assert (completion.token_ids, completion.logprobs) == (known.token_ids, known.logprobs)
        if n_old > 0 and n_cut == 0:
            assert sequence.n_shared >= n_old - 1  # the last token was sampled, but not read
            lengths.append(len(known.token_ids))
        texts.append(tokens + completion.token_ids)
    assert min(lengths) < 30 == max(lengths)  # some were stopped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bits": 2}, "cache_bits is 2; use 8 or 4"),
        ({"cache_bits": 8, "use_cache": False}, "cache_bits needs the KV cache"),
        ({"cache_bits": 8, "window": 9}, "cache_bits cannot be combined with a window"),
        (
            {"cache_bits": 4, "model": {"head_dim": 8}},
            "head_dim that is a multiple of 16, not 8; use 8 bits",
        ),
        *if_installed(
            "speculation",
            (
                {"cache_bits": 4, "speculate": 3},
                "speculate cannot be combined with a cache in 4 bits",
            ),
        ),
        (
            {"cache_bits": 8, "model": {"attention": "window(8)"}},
            "cache_bits has no effect: no layer",
        ),
        (
            {"cache_bits": 8, "model": {"attention": "linear(8)"}},
            "cache_bits has no effect: no layer",
        ),
    ],
    ids=str,
)
def test_what_does_not_apply_is_refused(options, message):
    config = {"d_model": 64, "vocab_size": 264} | options.pop("model", {})
    with pytest.raises(UserError, match=message):
        Generator(random_model(**config), TOKENIZER, **options)


@pytest.mark.parametrize("max_len", [4, 64])
def test_only_layers_that_keep_all_keys_are_rounded(max_len):
    """Also if the text is shorter than the window: the first tokens must not depend on how many may
    follow."""
    cache = make_cache(make_model("window in some layers"), 1, max_len, bits=8)
    assert [type(layer) is QuantizedLayer for layer in cache.layers] == [True, False]
    assert type(cache) is QuantizedCache
