"""The compiled step of a GPU and its buckets, on the CPU: the same tokens."""

import itertools
import math
import re
import shutil
import time

import pytest
import torch

import generate
from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.chat.conversation import Conversation
from thinker.generation.decoders import cache_buffers
from thinker.generation.decoders.compiled_decoder import CompiledDecoder, _Bucket
from thinker.generation.decoders.inference_model import fuse_for_inference

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)
TOKENIZER = make_tokenizer("byte", [])


@pytest.mark.stress
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_compiled_generator_gives_the_same_text_also_in_batches_and_with_fewer_bits(
    random_model, bits
):
    model = random_model(vocab_size=264, max_seq_len=64, n_layers=2)
    params = SamplingParams(max_new_tokens=20, seed=4)
    plain, compiled = plain_and_bucketed(model, bits=bits)
    for prompts in (["The cat"], ["The cat", "a", "The cat"]):
        assert_same(compiled.generate(prompts, params), plain.generate(prompts, params))


@pytest.mark.usefixtures("quickly_compiled")
def test_the_reported_rate_leaves_compiling_out(random_model, capfd):
    _, compiled = plain_and_bucketed(random_model(vocab_size=264, n_layers=1), dtype=torch.bfloat16)
    params = SamplingParams(10, temperature=0, logit_bias={TOKENIZER.bos_id: -math.inf})
    start = time.perf_counter()
    generate.print_samples(compiled, "hello", compiled.encode("hello"), params, 1, False)
    seconds, text = time.perf_counter() - start, capfd.readouterr().err
    found = re.search(r"10 tokens, ([\d,]+) tokens/s.*, after ([\d.]+) s of compiling", text)
    assert 0 < compiled.decoder.compile_seconds < seconds
    assert float(found[2]) == pytest.approx(compiled.decoder.compile_seconds, abs=0.1)
    assert float(found[1].replace(",", "")) >= 10 / (seconds - compiled.decoder.compile_seconds) - 1


@pytest.fixture
def buckets(monkeypatch):
    """The shapes of the buckets that were made; their steps run operation by operation."""
    shapes, make = [], _Bucket.__init__

    def recorded(bucket, *arguments):
        make(bucket, *arguments)
        shapes.append(bucket.shape)

    monkeypatch.setattr(_Bucket, "__init__", recorded)
    with torch.compiler.set_stance("force_eager"):
        yield shapes


def plain_and_bucketed(model, **how):
    plain, bucketed = (Generator(model, TOKENIZER, compile=False, **how) for _ in range(2))
    bucketed.decoder = CompiledDecoder(bucketed.model)
    return plain, bucketed


def assert_same(ours, known):
    assert [completion.text for completion in ours] == [completion.text for completion in known]
    for one, other in zip(ours, known):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("bits", [None, 8])
def test_buckets_give_the_texts_of_plain_decoding(random_model, buckets, bits):
    plain, bucketed = plain_and_bucketed(
        random_model(vocab_size=264, max_seq_len=300, norm_mean=0.3), bits=bits
    )
    for lengths, shapes in {
        (9, 9, 9): [(4, 128)],  # as given: all rows at the same position
        (30, 3, 17, 8, 25): [
            (8, 128),
            (4, 128),
            (2, 128),
            (1, 128),
        ],  # rows end one after the other
        (140, 12): [(2, 256), (1, 256)],
        (5,): [(1, 128)],
        (7,): [],  # the same bucket again
    }.items():
        prompts = ["The cat", "a", "The cat", "", "Once upon a time"]
        prompts = [prompts[0]] * len(lengths) if len(set(lengths)) == 1 else prompts[: len(lengths)]
        params = [SamplingParams(max_new_tokens=n, seed=n) for n in lengths]
        assert_same(bucketed.generate(prompts, params), plain.generate(prompts, params))
        assert buckets == shapes
        buckets.clear()


def test_rows_and_positions_that_a_cache_lacks_do_not_matter(random_model, buckets):
    """Whatever an earlier text left there, the logits are the same to the last bit."""
    model = fuse_for_inference(random_model())
    compiled, tokens = CompiledDecoder(model), torch.arange(60).view(3, 20)
    found = []
    for _ in range(2):
        cache = model.new_cache(3, 20)
        model(tokens[:, :6], cache=cache)
        cache.truncate([6, 2, 4])
        found.append(
            torch.cat([compiled.step(tokens[:, at : at + 1], cache) for at in range(6, 12)], dim=1)
        )
        for layer in compiled._bucket.buffers.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    assert torch.equal(*found)
    assert buckets == [(4, 128)]


def test_a_chat_keeps_its_bucket_and_other_texts_do_not_disturb_it(random_model, buckets):
    plain, bucketed = plain_and_bucketed(
        random_model(vocab_size=264, max_seq_len=300, norm_mean=0.3)
    )
    chats = [(Conversation(generator), generator) for generator in (plain, bucketed)]
    params, adopted = SamplingParams(max_new_tokens=12, seed=3), []
    for turn, text in enumerate(["Hello.", "Who are you?", " Yes.", "No."]):
        replies = ["".join(chat.reply(text, params)) for chat, _ in chats]
        assert replies[0] == replies[1]
        adopted.append(chats[1][0]._cache.layers[0].keys)
        if (
            turn == 2
        ):  # a text of the same shape comes into the bucket, and the chat gets memory of its own
            length = len(chats[0][0].tokens)
            others = [
                generator.generate(["x" * length], SamplingParams(max_new_tokens=301 - length - 1))
                for _, generator in chats
            ]
            assert_same(others[1], others[0])
            assert chats[1][0]._cache.layers[0].keys is not adopted[-1]
    assert adopted[0] is adopted[1] is adopted[2]  # copied once
    assert buckets == [(1, 384)]


def test_texts_read_in_turns_keep_apart(random_model, buckets):
    plain, bucketed = plain_and_bucketed(
        random_model(vocab_size=264, max_seq_len=60, norm_mean=0.3)
    )
    params, found = SamplingParams(max_new_tokens=15, seed=1), []
    for generator in (plain, bucketed):
        streams = [generator.stream(prompt, params) for prompt in ("The cat", "Once")]
        found.append(list(itertools.zip_longest(*streams)))
    assert found[0] == found[1]
    assert buckets == [(1, 128)]


def test_an_interrupted_copy_into_the_bucket_loses_nothing(random_model, buckets, monkeypatch):
    model = fuse_for_inference(random_model(n_layers=3))
    compiled, tokens = CompiledDecoder(model), torch.arange(20).view(1, 20)
    caches = [model.new_cache(1, 20) for _ in range(2)]
    for cache in caches:
        model(tokens[:, :6], cache=cache)
    with monkeypatch.context() as patches:
        replacements = [cache_buffers.replace]
        patches.setattr(
            cache_buffers, "replace", lambda *given, **new: replacements.pop()(*given, **new)
        )
        with pytest.raises(IndexError):  # at the second layer
            compiled.step(tokens[:, 6:7], caches[1])
    caches[1].truncate([6])
    for at in range(6, 9):
        plain = model(tokens[:, at : at + 1], cache=caches[0])
        torch.testing.assert_close(
            compiled.step(tokens[:, at : at + 1], caches[1]), plain, rtol=0, atol=1e-5
        )
