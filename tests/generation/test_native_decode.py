"""The native step equals the model's, for all that it supports, and leaves the rest to the
model."""

import random
import threading

import pytest
import torch
from conftest import random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders.inference_model import fuse_for_inference
from thinker.generation.decoders.native_decoder import NativeDecoder
from thinker.model.inspection.activation_hooks import open_hooks
from thinker.native import operations
from thinker.native.compiler import has_compiler
from thinker.runtime.errors import UserError

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
SHAPE = {
    "vocab_size": 301,
    "d_model": 60,
    "n_heads": 6,
    "head_dim": 14,
    "d_ff": 103,
    "max_seq_len": 64,
}
FORMS = {
    "mha": {},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1, "qk_norm": False},
    "tied": {"tie_embeddings": True},
    "bias": {"attention_bias": True},
    "softcap": {"attn_logit_softcap": 5.0},
    "sinks": {"attention_sinks": True},
    "window": {"attention": "window(8)"},
    "per layer": {"attention": ["full", "window(8)"]},
    "global": {"attention": "window(8) | global(3)"},
    "per head": {"attention": "heads(full, window(4))"},
    "tokens by id": {"attention": "window(8) | token(5, 9)"},
    "random": {"attention": "window(8) | random(4, 1)"},
    "alibi": {"positions": "alibi"},
    "no positions": {"positions": "none"},
    "no rope in layer 0": {"no_rope_layers": [0]},
    "scaled rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic rope": {
        "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_seq_len": 40}
    },
    "uneven kv heads": {"n_kv_heads": 2, "n_kv_heads_per_layer": [2, 1]},
    "prefix": {"attention": "prefix(4)"},
    "wide heads": {"n_heads": 2, "head_dim": 72},  # two vectors of values at once, and a rest
}
UNSUPPORTED = {
    "learned": {"positions": "learned"},
    "relative": {"positions": "relative"},
    "linear": {"attention": "linear(16)"},
    "top-k": {"attention": "topk(4)"},
    "retrieval": {"attention": "retrieve(4, 2)"},
    "token shift": {"token_shift": True},
    "value embeddings": {"value_embeddings": True},
    "embedding of pairs": {"bigram_rows": 31},
}


def make(form, **how):
    model = random_model(norm_mean=0.3, n_layers=2, **{**SHAPE, **form})
    return fuse_for_inference(model, native=True, **how)


def filled(model, lengths, n_new):
    """Equal caches for the step and the model, with rows of these lengths."""
    B, longest = len(lengths), max(lengths)
    tokens = torch.randint(0, 301, (B, longest), generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(B, longest + n_new, slack=longest) for _ in range(2)]
    for cache in caches:
        model(tokens, cache=cache)
        cache.truncate(lengths)
    return caches


@pytest.mark.parametrize("lengths", [[20], [20, 20], [20, 17, 9]], ids=str)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_logits_and_cache_equal_the_models(form, lengths, T):
    model = make(FORMS[form])
    decoder = NativeDecoder(model)
    assert decoder.is_supported
    ours, known = filled(model, lengths, 3 * T)
    for turn in range(3):
        tokens = torch.randint(
            0, 301, (len(lengths), T), generator=torch.Generator().manual_seed(turn)
        )
        expected = model(tokens, cache=known)
        torch.testing.assert_close(
            decoder.step(tokens, ours), expected, rtol=0, atol=1e-5 * expected.abs().max().item()
        )
    assert ours.lengths == known.lengths
    for one, other in zip(ours.layers, known.layers):
        torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"bits": 8}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("form", ["mha", "gqa", "mqa", "window", "bias"])
@torch.no_grad()
def test_rounded_forms_are_close(form, how):
    model = make(FORMS[form], **how)
    decoder, (ours, known) = NativeDecoder(model), filled(model, [20, 11], 3)
    for turn in range(3):
        tokens = torch.randint(0, 301, (2, 1), generator=torch.Generator().manual_seed(turn))
        expected = model(tokens, cache=known).float()
        error = (decoder.step(tokens, ours).float() - expected).norm() / expected.norm()
        assert error < 0.03  # sums in another order may round an activation to the next code


def count_native(monkeypatch):
    calls, run = [], operations.Workspace.run

    def counted(self, steps, *arguments):
        calls.append(len(steps))
        return run(self, steps, *arguments)

    monkeypatch.setattr(operations.Workspace, "run", counted)
    return calls


@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"bits": 8}, {"bits": 4}], ids=str)
@pytest.mark.parametrize(
    "form", ["mha", "gqa", "mqa", "bias", "softcap", "sinks", "no positions", "wide heads"]
)
@torch.no_grad()
def test_a_position_has_the_same_bits_in_any_batch_and_any_pass(form, how):
    """Texts are read alone in one pass, token by token, and in chunks of random length beside each
    other."""
    decoder = NativeDecoder(make(FORMS[form], **how), for_all_passes=True)
    assert decoder.is_batch_invariant
    generator = random.Random(form)
    texts = [[generator.randrange(301) for _ in range(n)] for n in (1, 7, 36, 60, 49)]
    alone = []
    for text in texts:
        cache = decoder.model.new_cache(1, 64)
        alone.append(
            (
                decoder.step(torch.tensor([text]), cache)[0],
                [layer.keys[0, :, : len(text)] for layer in cache.layers],
            )
        )
    by_token = decoder.model.new_cache(1, 64)
    one_by_one = [decoder.step(torch.tensor([[token]]), by_token)[0, 0] for token in texts[3]]
    assert torch.equal(torch.stack(one_by_one), alone[3][0])
    pool, n_read, n_wanted = decoder.model.new_cache(len(texts), 64), [0] * len(texts), 0
    while left := [row for row, text in enumerate(texts) if n_read[row] < len(text)]:
        rows, tokens = [], []
        for row in generator.sample(left, generator.randint(1, len(left))):
            chunk = texts[row][n_read[row] :][: generator.choice([1, 2, 3, 5, 40])]
            rows += [row] * len(chunk)
            tokens += chunk
        wanted = sorted(generator.sample(range(len(rows)), generator.randint(0, len(rows))))
        logits = decoder.read(pool, rows, tokens, wanted)
        positions = [n_read[row] + rows[:index].count(row) for index, row in enumerate(rows)]
        for index, found in zip(wanted, logits, strict=True):
            assert torch.equal(found, alone[rows[index]][0][positions[index]])
            n_wanted += 1
        for row in rows:
            n_read[row] += 1
        assert pool.lengths == n_read
    for row, (text, (_, keys)) in enumerate(zip(texts, alone)):
        for layer, known in zip(pool.layers, keys):
            assert torch.equal(layer.keys[row, :, : len(text)], known)
    assert n_wanted > 10


@pytest.mark.parametrize("form", UNSUPPORTED)
@torch.no_grad()
def test_other_models_decode_in_torch(form):
    model = make(UNSUPPORTED[form])
    decoder = NativeDecoder(model)
    assert not decoder.is_supported
    cache = model.new_cache(1, 12)
    known = model(torch.arange(8)[None])[:, 7:]
    model(torch.arange(7)[None], cache=cache)
    torch.testing.assert_close(decoder.step(torch.tensor([[7]]), cache), known, rtol=0, atol=1e-4)


@torch.no_grad()
def test_one_call_runs_a_step_and_hooks_run_in_the_model(monkeypatch):
    model, calls = make({}), count_native(monkeypatch)
    decoder, (cache, known) = NativeDecoder(model), filled(model, [9], 8)
    calls.clear()
    decoder.step(torch.tensor([[5]]), cache)
    assert calls == [2 + 6 * 2]
    model(torch.tensor([[5]]), cache=known)
    with open_hooks(model, ["blocks.0.mlp"], {"blocks.1.mlp": "zero"}) as recorded:
        patched = decoder.step(torch.tensor([[6]]), cache)
        expected = model(torch.tensor([[6]]), cache=known)
    assert recorded["blocks.0.mlp"].shape == (1, 1, 60)
    torch.testing.assert_close(patched, expected)
    with pytest.raises(UserError, match="token id 301 in tokens is out of range"):
        decoder.step(torch.tensor([[301]]), cache)
    with pytest.raises(UserError, match="1 rows, not 2"):
        decoder.step(torch.tensor([[1], [2]]), cache)


@torch.no_grad()
def test_caches_in_turns_and_memory_that_is_used_again():
    """A new cache may lie where an old one lay, or half of it."""
    model = make({"n_kv_heads": 2})
    decoder = NativeDecoder(model)
    for turn in range(60):
        lengths = [3 + turn % 7] * (1 + turn % 3)
        ours, known = filled(model, lengths, 4 + turn % 5)
        tokens = torch.full((len(lengths), 1), turn)
        torch.testing.assert_close(
            decoder.step(tokens, ours), model(tokens, cache=known), rtol=0, atol=1e-4
        )


def test_threads_share_a_generator():
    tokenizer = make_tokenizer("byte", [])
    generator = Generator(random_model(vocab_size=tokenizer.vocab_size, max_seq_len=64), tokenizer)
    prompts, params = ["The cat", "a", "Once"], SamplingParams(max_new_tokens=30, seed=2)
    known, found = (
        [generator.generate(prompt, params)[0].token_ids for prompt in prompts],
        [None] * 3,
    )

    def work(index):
        found[index] = generator.generate(prompts[index], params)[0].token_ids

    threads = [threading.Thread(target=work, args=[index]) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == known


def test_positions_beyond_the_table_of_angles(monkeypatch):
    from thinker.generation.decoders import native_forward

    tokenizer = make_tokenizer("byte", [])
    model = random_model(
        vocab_size=tokenizer.vocab_size, attention="window(8)", max_seq_len=32, norm_mean=0.3
    )
    params = SamplingParams(max_new_tokens=100, seed=1, logit_bias={tokenizer.bos_id: -torch.inf})
    known = Generator(model, tokenizer, compile=False).generate("ab", params)[0].token_ids
    assert Generator(model, tokenizer).generate("ab", params)[0].token_ids == known
    monkeypatch.setattr(native_forward, "MAX_TABLE_LEN", 20)
    assert Generator(model, tokenizer).generate("ab", params)[0].token_ids == known
    assert len(known) == 100


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-200, 1e-45])
def test_tiny_temperatures_are_greedy(temperature, compile):
    """Also those that no logit can be divided by."""
    tokenizer = make_tokenizer("byte", [])
    model = random_model(1, vocab_size=tokenizer.vocab_size, max_seq_len=64)
    generator = Generator(model, tokenizer, compile=compile)
    texts = []
    for number in (0, temperature):
        params = SamplingParams(30, temperature=number)
        texts.append([one.token_ids for one in generator.generate(["a", "bc"], params)])
    assert texts[0] == texts[1]
