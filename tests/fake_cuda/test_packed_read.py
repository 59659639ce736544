"""A continuous batch on a GPU: the host waits for the sampled tokens alone, and neither prompts nor
rows add launches."""

import pytest
import torch
from device_trace import DeviceTrace

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.generation import Generator, SamplingParams
from thinker.generation.batching.batch_rows import JoinedRows, PooledRows
from thinker.generation.batching.continuous_batch import ContinuousBatch
from thinker.generation.sequence import Completion
from thinker.model import Thinker, ThinkerConfig
from thinker.serving.__main__ import describe_decoder

UPLOAD = "runtime/device.py:to_device"
READ = "generation/sampler.py:sample_steps"
N_ROWS = 16


@pytest.fixture
def new_batch(gpu):
    def new(dtype=torch.bfloat16, n_layers=2, **config):
        shape = {"vocab_size": 264, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
        with gpu:
            model = Thinker(ThinkerConfig(**shape, n_layers=n_layers, max_seq_len=512, **config))
        # No kernels in Triton, which the fake device could not run.
        generator = Generator(model, make_tokenizer("byte", []), dtype=dtype, compile=False)
        batch = ContinuousBatch(generator, N_ROWS)
        assert isinstance(batch.rows, PooledRows)
        model = batch.generator.model
        if model.rope is not None:
            model.rope(torch.arange(512, device=gpu), 512, dtype)  # makes its table
        return batch

    return new


def add(batch, lengths):
    """Add a prompt of each length, all different from the first token on."""
    for length in lengths:
        index = len(batch.running) + len(batch.waiting)
        params = SamplingParams(50, temperature=0)
        tokens = [index + 2] * length
        batch.add(batch.generator.new_sequence(index, Completion(""), params, tokens))


def traced_step(batch):
    with DeviceTrace(answer=1) as trace:
        steps = batch.step()
    assert trace.waits == {}
    return trace, steps


CASES = [(torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, {"attention_sinks": True})]


@pytest.mark.parametrize(("dtype", "config"), CASES, ids=str)
def test_prompts_are_read_together_whatever_their_number(new_batch, dtype, config):
    launches = []
    for n in (2, 8):
        batch = new_batch(dtype, **config)
        add(batch, [30 + index for index in range(n)])
        trace, steps = traced_step(batch)
        assert len(steps) == n  # all have their first token
        assert trace.reads == {READ: 2}  # tokens and log-probabilities
        launches.append(trace.launches)
    assert launches[0] == launches[1]


@pytest.mark.parametrize(("dtype", "config"), CASES, ids=str)
def test_rows_decode_in_one_pass_whatever_their_number(new_batch, dtype, config):
    launches = []
    for n in (2, 8):
        batch = new_batch(dtype, **config)
        add(batch, [30 + index for index in range(n)])
        traced_step(batch)
        trace, steps = traced_step(batch)
        assert len(steps) == n
        assert trace.reads == {READ: 2}
        launches.append(trace.launches)
    assert launches[0] == launches[1]


def test_prompts_beside_decoding_add_the_launches_of_one_group(new_batch):
    launches = []
    for n in (2, 8):
        batch = new_batch()
        add(batch, [30, 31])
        traced_step(batch)
        add(batch, [40 + index for index in range(n)])
        trace, steps = traced_step(batch)
        assert len(steps) == 2 + n
        assert trace.reads == {READ: 2}
        launches.append(trace.launches)
    assert launches[0] == launches[1]


def test_several_steps_are_read_at_once(new_batch):
    batch = new_batch()
    add(batch, [30, 30, 30])
    traced_step(batch)
    batch.generator.decoder.seconds_per_step = 1e-9  # of a fast card
    trace, steps = traced_step(batch)
    assert [len(progress.sampled) for progress in steps] == [16] * 3
    assert trace.reads == {READ: 2}


def test_pieces_of_plain_models_use_the_variable_length_kernel(new_batch):
    for dtype, config in CASES:
        batch = new_batch(dtype, **config)
        add(batch, [30, 31])
        trace, _ = traced_step(batch)
        is_plain = dtype == torch.bfloat16 and not config
        assert trace.launches["torch_attn._varlen_attn"] == (2 if is_plain else 0)  # per layer


def test_a_server_warms_up_and_names_its_decoder(new_batch):
    batch = new_batch()
    with DeviceTrace(answer=1):
        batch.warm_up()
    assert batch.is_idle
    assert describe_decoder(batch.generator) == "; decoded by torch"


def test_a_server_says_why_prompts_are_read_one_by_one(gpu):
    shape = {"vocab_size": 264, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64}
    with gpu:
        model = Thinker(ThinkerConfig(**shape, attention="window(8)"))
    generator = Generator(model, make_tokenizer("byte", []), dtype=torch.bfloat16)
    assert isinstance(ContinuousBatch(generator, 2).rows, JoinedRows)
    reason = "packed reads do not know model.attention=window(8)"
    expected = f"; decoded by torch; prompts are read one by one: {reason}"
    assert describe_decoder(generator) == expected
