"""Sizes nobody has are refused before anything is made of them; what fits never is."""

import re

import pytest
import torch
from conftest import ROOT, run_script

from thinker.model import Thinker, ThinkerConfig
from thinker.runtime import memory
from thinker.runtime.errors import UserError
from thinker.training.config.load import validate_config
from thinker.training.settings import memory_bound
from thinker.training.settings.memory_estimate import estimate_memory
from thinker.training.settings.resolve import resolve_settings

CPU = torch.device("cpu")
VARIANTS = [
    {},
    {"tie_embeddings": True, "n_kv_heads": 1, "head_dim": 10, "qk_norm": False},
    {"positions": "learned", "attention_bias": True, "attention_sinks": True},
    {"n_kv_heads": 2, "n_kv_heads_per_layer": [1, 2, 2], "d_ff": 77},
    {"attention": ["full", "linear(8)", "full"]},
    {"value_embeddings": True, "bigram_rows": 2560, "n_kv_heads": 2},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_least_number_of_parameters_is_just_below_the_real_one(options):
    shape = ThinkerConfig(vocab_size=512, d_model=64, n_layers=3, max_seq_len=128, **options)
    with torch.device("meta"):
        real = sum(parameter.numel() for parameter in Thinker(shape).parameters())
    assert 0.95 * real < memory_bound.least_parameters(shape) <= real


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "train", [{}, {"checkpoint_every_n_blocks": 1}, {"micro_batch_size": 2}], ids=str
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_least_memory_is_below_what_a_step_takes(optimizer, train, precision):
    shape = {"vocab_size": 300, "d_model": 64, "n_layers": 3}
    train = {"max_steps": 5, "batch_size": 8, "compile": False, "precision": precision, **train}
    config = validate_config(
        {"model": shape, "data": {"seq_len": 64}, "optimizer": {"name": optimizer}, "train": train}
    )
    settings = resolve_settings(config, config.thinker_config(300), CPU)
    on_device, on_host = memory_bound.least_memory(config)
    estimate = estimate_memory(settings, settings.train.micro_batch_size, CPU)
    assert 0.1 * estimate.peak < sum(on_device.values()) < estimate.peak
    assert on_device["weights"] > 0.95 * estimate.weights
    assert on_device["optimizer"] <= estimate.optimizer
    assert on_device["activations"] <= estimate.activations
    assert on_host == {"batch": 8 * 8 * 64}


def test_a_run_is_refused_when_its_bound_exceeds_the_memory_and_not_before(monkeypatch):
    config = validate_config({"train": {"max_steps": 5, "batch_size": 8}})
    needed = sum(sum(part.values()) for part in memory_bound.least_memory(config))
    monkeypatch.setattr(memory, "_host_memory", lambda: (needed - 7, 7))
    memory_bound.check_run_fits(config, CPU)
    monkeypatch.setattr(memory, "_host_memory", lambda: (needed - 7, 6))
    with pytest.raises(
        UserError, match=r"at least .* \(weights .*, gradients .*\), but .*; lower model.d_model"
    ):
        memory_bound.check_run_fits(config, CPU)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_model=1000000", "of memory (weights"),
        ("train.batch_size=16000000", "activations"),
        ("train.batch_size=1000000000", "it must be at most 16777216"),
        ("model.n_layers=20000", "it must be at most 10000"),
        ("data.seq_len=16777216", "activations"),
        ("train.dist_timeout_s=1.0e+300", "it must be at most 100000000"),
    ],
)
def test_train_refuses_a_size_nobody_has_in_one_line(train_args, tmp_path, override, message):
    options = [f"run.dir={tmp_path / 'run'}", "model.d_ff=1000000", "model.n_layers=200", override]
    done = run_script(*train_args, *options)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert not (tmp_path / "run").exists()


def test_generate_refuses_a_million_samples_before_it_makes_any(tiny_run):
    done = run_script(ROOT / "generate.py", tiny_run, "--prompt", "Line", "--num-samples", 10**9)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(
        r"error: this needs at least .* of memory \(cache .*reduce the number of samples", line
    )


def test_a_generator_refuses_more_samples_than_memory_holds(tiny_run, monkeypatch):
    from thinker import Generator, SamplingParams, load

    generator = Generator(*load(tiny_run))
    monkeypatch.setattr(memory, "_host_memory", lambda: (200_000, 0))
    params = SamplingParams(max_new_tokens=20, seed=1)
    assert len(generator.generate(["Line"] * 5, params)) == 5
    with pytest.raises(
        UserError, match=r"needs at least .* \(cache .*reduce the number of samples"
    ):
        generator.generate(["Line"] * 500, params)
