"""Whether to compile on a GPU: by the time of a step that is not compiled, and by counted bytes."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from device_trace import ROOT, DeviceTrace
from test_training_step import OPTIONS, new_step

from thinker.model import ThinkerConfig
from thinker.training.config.load import validate_config
from thinker.training.settings import compile_choice
from thinker.training.settings.resolve import resolve_settings

GPU = torch.device("cuda:0")
SHAPE = ThinkerConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_seq_len=32)
N_PRODUCTS = 3 * (2 * 7 + 1)  # one forward and two backward, of each matrix and the head


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setattr(compile_choice.importlib.util, "find_spec", lambda name: name)


@pytest.fixture
def clock(monkeypatch):
    """A clock by which the first pass takes 50 s and others take 2 s, once 3 s."""
    times = list(itertools.accumulate([0, 50, 0, 2, 0, 3, 0, 2]))
    clock = SimpleNamespace(perf_counter=lambda: times.pop(0))
    monkeypatch.setattr(compile_choice, "time", clock)


def resolve(**train):
    train = {"batch_size": 8, "micro_batch_size": 2, "precision": "bf16"} | train
    config = validate_config({"train": train, "data": {"seq_len": 32}})
    return resolve_settings(config, SHAPE, GPU)


def test_the_passes_of_a_micro_batch_are_timed_beyond_the_first(gpu, clock):
    settings = resolve(max_steps=9, compile=False)
    with DeviceTrace() as trace:
        seconds = compile_choice.measure_plain_step(settings, GPU)
    assert seconds == 4 * 2  # four micro-batches
    assert trace.launches["aten.mm"] == 4 * N_PRODUCTS
    assert trace.reads == {}


@pytest.mark.parametrize(("max_steps", "saved", "is_compiled"), [(18, 43, False), (19, 46, True)])
def test_compiling_pays_off_if_the_steps_save_more_than_it_takes(
    gpu, clock, capsys, max_steps, saved, is_compiled
):
    with DeviceTrace():
        settings = resolve(max_steps=max_steps, compile="auto")
    assert settings.train.compile == is_compiled
    assert capsys.readouterr().err == (
        f"{'' if is_compiled else 'not '}compiling the blocks: a step takes 8 s without; it takes "
        f"about 45 s and saves about {saved} of {8 * max_steps} s\n"
    )


def test_only_steps_are_timed_not_minutes(monkeypatch):
    monkeypatch.setattr(compile_choice, "measure_plain_step", None)
    assert not resolve(max_minutes=2.4).train.compile
    assert resolve(max_minutes=2.6).train.compile
    assert not resolve(max_steps=10**6, deterministic=True).train.compile


def test_a_step_that_does_not_fit_is_compiled(gpu, monkeypatch, capsys):
    def too_large(settings, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compile_choice, "measure_plain_step", too_large)
    assert resolve(max_steps=2).train.compile
    assert "does not fit into memory" in capsys.readouterr().err


def recorded(name):
    for line in (ROOT / "benchmarks" / "results" / "recorded.jsonl").open():
        row = json.loads(line)
        if row["name"] == name:
            return row["rows"]


def gigabytes(text):
    return float(text.split(" GB")[0]) * 1e9


def test_the_share_that_compiling_saves_is_at_most_what_the_bytes_account_for(gpu, monkeypatch):
    """Of the 124M model: the bytes of a block that is not compiled, without its products and
    attention and with the cheapest norm, beyond those of a compiled block with its products."""
    # torch's kernel for the norm reads and writes at least as much as this.
    monkeypatch.setattr("torch.nn.functional.rms_norm", lambda x, shape, eps: 2 * x)
    shape = {"d_model": 768, "n_heads": 6, "n_kv_heads": 6, "head_dim": 128}
    options = {name: values[0] for name, values in OPTIONS.items()}
    elementwise = []
    for n_layers in (1, 2):
        step, batch = new_step(gpu, options, T=4096, n_layers=n_layers, **shape)
        rows = batch.rows(slice(0, 4), gpu)  # 16,384 tokens
        trace = ElementwiseTrace()
        with trace, step.fast_model():
            step.objective(step.parallel_model, rows).sum.backward()
        elementwise.append(trace.bytes_moved)
    of_block = elementwise[1] - elementwise[0]
    joined = recorded("gpu-counted-layers")[2:]
    of_compiled_block = sum(gigabytes(row["bytes moved at most"]) for row in joined)
    (loss,) = [row for row in recorded("gpu-counted-steps") if "loss" in row["counted"]]
    of_loss = gigabytes(loss["otherwise"]) - gigabytes(loss["now"])  # 32,768 rows

    n_tokens = 262_144
    saved_bytes = 12 * n_tokens / 16_384 * (of_block - of_compiled_block)
    saved_bytes += n_tokens / 32_768 * of_loss
    saved = saved_bytes / 4.29e12  # the copy rate of an H200, its compiled step takes 0.518 s
    assert compile_choice.COMPILE_COST["cuda"][1][0] <= saved / (saved + 0.518) < 0.6


class ElementwiseTrace(DeviceTrace):
    """Counts the bytes of all but products and attention."""

    def record(self, name, inputs, outputs):
        if name != "aten.mm" and "attention" not in name:
            super().record(name, inputs, outputs)
