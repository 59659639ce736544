"""Decoding steps: two compiled programs whatever the lengths, and the host never waits for the
device."""

from functools import partial
from itertools import product

import pytest
import torch
from device_trace import DeviceTrace
from torch._dynamo.backends.common import aot_autograd

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.decoders import compiled_decoder as compiled_decode
from thinker.generation.fused.captured_step import CapturedStep
from thinker.generation.fused.decode_buffers import Launch
from thinker.generation.fused.fused_decoder import FusedDecoder
from thinker.generation.sampler import sample_steps
from thinker.generation.sequence import Completion
from thinker.model import Thinker, ThinkerConfig

UPLOAD = "runtime/device.py:to_device"


@pytest.fixture
def new_generator(gpu, monkeypatch):
    """A Generator on the device, and the list of its compiled programs: traced, but neither lowered
    nor captured."""
    programs, torch_compile = [], torch.compile

    def compile(function, options, **arguments):
        def keep(graph, inputs):
            programs.append(graph)
            return graph.forward

        return torch_compile(function, backend=aot_autograd(fw_compiler=keep), **arguments)

    def new(**options):
        shape = {
            "vocab_size": 264,
            "d_model": 32,
            "n_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 16,
        }
        with gpu:
            model = Thinker(ThinkerConfig(**shape, max_seq_len=4096))
        return Generator(
            model, make_tokenizer("byte", []), dtype=torch.bfloat16, **options
        ), programs

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(compiled_decode._Bucket, "_capture", lambda self: self._step())
    return new


@pytest.fixture
def _uncompiled():
    """A trace cannot look into what dynamo compiles: run it operation by operation."""
    with torch.compiler.set_stance("force_eager"):
        yield


def texts_of_lengths(generator, lengths, max_len):
    """Sequences of these lengths, and a cache that holds all of their tokens but the last."""
    sequences = [
        generator.new_sequence(
            index, Completion(""), SamplingParams(max_new_tokens=9), [1] * length
        )
        for index, length in enumerate(lengths)
    ]
    cache = generator.new_cache(len(lengths), max_len)
    cache.reserve(len(lengths), max(lengths) - 1)
    cache.truncate([length - 1 for length in lengths])
    return sequences, cache


# Sizes that are equal to one another, to the number of KV heads, and to the width of a head.
PAIRS = [*product((1, 2, 3, 4, 9, 16, 128), (20, 128, 300)), (1, 4096), (2, 4096)]


def test_rows_and_capacity_are_symbols_of_two_programs_per_model(new_generator):
    for bits in (None, 8):
        generator, programs = new_generator(compile=True, bits=bits)
        programs.clear()
        with torch._dynamo.config.patch(recompile_limit=2):
            for index, (rows, max_len) in enumerate(PAIRS[::3] if bits else PAIRS):
                lengths = [
                    2 + row % 7 * (index % 2) for row in range(rows)
                ]  # equal and ragged in turns
                texts = texts_of_lengths(generator, lengths, max_len)
                logits = generator._decode_step(*texts)
                assert logits.shape == (rows, 1, 264)
        assert len(programs) == 2
        products = [
            sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)
            for graph in programs
        ]
        assert products == (
            [0, 5] if bits else [5, 5]
        )  # a row of int8 weights is summed up by the fused kernel


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("lengths", [[9], [9, 9, 9], [9, 4, 7]], ids=str)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("_uncompiled")
def test_a_step_uploads_tokens_and_positions_without_waiting(
    gpu, new_generator, compile, lengths, bits
):
    generator, _ = new_generator(compile=compile, bits=bits)
    generator.model.rope(torch.arange(64, device=gpu), 64, torch.bfloat16)  # makes its table
    sequences, cache = texts_of_lengths(generator, lengths, 64)
    generator._decode_step(sequences, cache)  # makes the bucket
    with DeviceTrace() as trace:
        for sequence in sequences:
            sequence.tokens.append(1)
        generator._decode_step(sequences, cache)
    assert trace.reads == trace.waits == {}
    has_positions = (
        compile or len(set(lengths)) > 1
    )  # eager rows of one length take theirs from arange
    assert trace.uploads == {UPLOAD: 1 + has_positions}


@pytest.mark.usefixtures("_uncompiled")
def test_rows_that_end_leave_without_waiting(new_generator):
    generator, _ = new_generator(compile=True)
    sequences, cache = texts_of_lengths(generator, [9, 4, 7], 64)
    generator._decode_step(sequences, cache)
    with DeviceTrace() as trace:
        cache.select([0, 2])
        generator._decode_step([sequences[0], sequences[2]], cache)
    assert trace.reads == trace.waits == {}
    assert trace.uploads == {UPLOAD: 3}


SETTINGS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top-k": {"top_k": 5, "logprobs": 2},
    "top-p": {"top_p": 0.9, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "top_k": 200, "top_p": 0.9},
    "bias": {"logit_bias": {3: 1.0}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("_uncompiled")
def test_steps_are_sampled_without_waiting_and_read_at_once(new_generator, setting, monkeypatch):
    generator, _ = new_generator(compile=True)
    assert generator.decoder.steps_per_read == 16
    params = [SamplingParams(seed=seed, **SETTINGS[setting]) for seed in range(3)]
    sequences = [
        generator.new_sequence(i, Completion(""), each, [1] * 9) for i, each in enumerate(params)
    ]
    cache = generator.new_cache(3, 64)
    cache.reserve(3, 9)
    logits = torch.zeros(3, 1, 264, device="cuda")
    step = partial(generator.decoder.step, cache=cache)
    with DeviceTrace():
        sample_steps(sequences, logits, 2, step)  # makes the bucket
    with DeviceTrace() as trace:
        sampled = sample_steps(sequences, logits, 16, step)
    assert [len(tokens) for tokens in sampled] == [16] * 3
    assert trace.waits == {}
    n_reads = 4 if "logprobs" in SETTINGS[setting] else 2  # at the end, of all steps
    assert trace.reads == {"generation/sampler.py:sample_steps": n_reads}
    assert trace.uploads == {
        UPLOAD: 16 + 2 * (setting == "penalties")
    }  # random numbers, positions, text


@pytest.mark.parametrize("n_texts", [1, 3])
@pytest.mark.usefixtures("_uncompiled")
def test_fused_steps_are_read_at_once(new_generator, n_texts, monkeypatch):
    launches = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    monkeypatch.setattr(CapturedStep, "_capture", lambda self: None)
    monkeypatch.setattr(CapturedStep, "agrees_with_model", lambda self: True)
    generator, _ = new_generator()
    decoder = FusedDecoder(generator.decoder)
    sequences, cache = texts_of_lengths(generator, [9] * n_texts, 64)
    logits = torch.zeros(n_texts, 1, 264, device="cuda")
    with DeviceTrace():
        decoder.sample(sequences, cache, logits, 1)  # makes the step
    launches.clear()
    with DeviceTrace() as trace:
        sampled = decoder.sample(sequences, cache, logits, 16)
    assert [len(tokens) for tokens in sampled] == [16] * n_texts
    assert trace.waits == {}
    assert trace.reads == {"generation/fused/captured_step.py:sample": 2}
    # Random numbers, temperatures, and places.
    assert trace.uploads == {UPLOAD: 3}
    n_products = trace.launches["aten.mm"]
    if n_texts == 1:  # 15 times embedding, 5 kernels of a layer and head, and 16 choices
        assert (len(launches), n_products) == (15 * 7 + 16 + 1, 0)
    else:  # 15 times the embedding and 4 of a layer, and 16 times the kernels that sample
        assert (len(launches), n_products) == (15 * 5 + 16 * 2, 15 * 5)
