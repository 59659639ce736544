"""Memory estimates and plans agree with what training then takes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from fork_server import run_ranks
from memory_workers import peak_of_two_steps

from thinker.data.batches.windows import PackedDataset
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config, validate_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.reports import plan as plan_module
from thinker.training.reports.plan import make_plan
from thinker.training.settings import memory_estimate
from thinker.training.settings.memory_estimate import (
    MemoryEstimate,
    estimate_memory,
    free_memory,
    largest_micro_batch,
)
from thinker.training.settings.resolve import resolve_settings

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG = ThinkerConfig(vocab_size=512, d_model=128, n_layers=2, n_heads=4, max_seq_len=128)


def settings(n_layers=2, optimizer="muon", **train):
    train = {"precision": "fp32", "compile": False, "max_steps": 9, "batch_size": 8, **train}
    config = validate_config(
        {"data": {"seq_len": 128}, "optimizer": {"name": optimizer}, "train": train}
    )
    return resolve_settings(config, dataclasses.replace(CONFIG, n_layers=n_layers), CPU)


def test_estimated_weights_gradients_and_optimizer_are_exact():
    memory = estimate_memory(settings(), 8, CPU)
    parameters = dict(Thinker(CONFIG).named_parameters())
    matrices = [p for name, p in parameters.items() if "proj" in name or name == "lm_head.weight"]
    n_muon = sum(p.numel() for p in matrices)
    total = sum(p.numel() for p in parameters.values())
    assert memory.weights == memory.gradients == 4 * total
    step_counts = 4 * (len(parameters) - len(matrices))  # AdamW has one per parameter
    row_second_moments = 4 * sum(p.shape[0] for p in matrices)  # Muon
    rope = 2 * 4 * 128 * 32  # two tables for 128 positions, made in the first step
    positions = 8 * 128  # int64, held by the cached mask
    state = 4 * n_muon + 8 * (total - n_muon) + step_counts + row_second_moments
    assert memory.optimizer == state + rope + positions
    assert memory.peak > memory.weights + memory.optimizer + memory.activations


@pytest.mark.parametrize(
    ("micro", "every"), [(2, None), (8, 1), pytest.param(8, None, marks=pytest.mark.stress)]
)
def test_estimated_peak_matches_a_measured_step(micro, every):
    """In a process whose malloc returns freed memory at once, so that only tensors count."""
    shape = {"vocab_size": 2048, "d_model": 256, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
    train = {"micro_batch_size": micro, "checkpoint_every_n_blocks": every, "batch_size": 8, "precision": "fp32",
             "compile": False, "max_steps": 9}  # fmt: skip
    tree = {"data": {"seq_len": 256}, "train": train}
    (measured,) = run_ranks(1, peak_of_two_steps, tree, shape)
    settings = resolve_settings(validate_config(tree), ThinkerConfig(**shape), CPU)
    predicted = estimate_memory(settings, micro, CPU).peak
    assert measured == pytest.approx(predicted, rel=0.15)


def test_checkpointing_lowers_activations_and_estimating_keeps_the_rng_state():
    torch.manual_seed(7)
    activations = [
        estimate_memory(settings(4, "adamw", checkpoint_every_n_blocks=n), 8, CPU).activations
        for n in (1, 2, None)
    ]
    assert torch.get_rng_state().equal(torch.manual_seed(7).get_state())
    assert activations[0] < 0.5 * activations[2]
    assert activations[0] < activations[1] < activations[2]


def test_gradients_of_adapters_alone():
    plain = settings(4, "adamw")
    whole, lora = (estimate_memory(plain.with_train(lora_rank=rank), 8, CPU) for rank in (None, 2))
    assert whole.gradients == whole.weights == lora.weights
    assert 0 < lora.gradients < 0.1 * lora.weights
    assert lora.optimizer > 2 * lora.gradients  # two moments, and the adapters' own weights


def test_largest_micro_batch(monkeypatch):
    estimates = {size: estimate_memory(settings(1, "adamw"), size, CPU) for size in (1, 2, 4, 8)}
    monkeypatch.setattr(
        memory_estimate, "estimate_memory", lambda settings, size, device: estimates[size]
    )
    peaks = {size: estimate.peak for size, estimate in estimates.items()}
    assert peaks[1] < peaks[2] < peaks[4] < peaks[8]
    for size in (1, 2, 4):
        free = (peaks[size] + peaks[2 * size]) / 2 / 0.6
        assert largest_micro_batch(settings(1), CPU, int(free)) == size
    assert largest_micro_batch(settings(1), CPU, 2**40) == 8
    with pytest.raises(
        UserError, match=r"one sequence of 128 tokens needs .* MB .*checkpoint_every_n_blocks=1"
    ):
        largest_micro_batch(settings(1), CPU, peaks[1])
    assert 2**20 < free_memory(CPU) < 2**50


@pytest.mark.parametrize("batch_size", [1, 7, 12, 96])
def test_the_largest_micro_batch_is_found_with_few_estimates(monkeypatch, batch_size):
    """Of every free memory; the whole batch at once may take less than half of it, whose gradients
    are added up."""
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    peaks, tried = {size: 60 * size for size in divisors}, []
    peaks[batch_size] -= 30 * batch_size + 6

    def estimate(settings, size, device):
        tried.append(size)
        return MemoryEstimate(0, 0, 0, 0, peaks[size])

    monkeypatch.setattr(memory_estimate, "estimate_memory", estimate)
    for free in sorted({peak + more for peak in peaks.values() for more in (-1, 0, 1)}):
        tried.clear()
        fitting = [size for size in divisors if peaks[size] <= free]
        monkeypatch.setattr(memory_estimate, "usable_fraction", lambda device: 1)
        if fitting:
            assert largest_micro_batch(settings(batch_size=batch_size), CPU, free) == max(fitting)
        else:
            with pytest.raises(UserError, match="one sequence"):
                largest_micro_batch(settings(batch_size=batch_size), CPU, free)
        assert len(tried) == len(set(tried)) <= 1 + len(divisors).bit_length()


def test_plan_command(run_script, tmp_path):
    small = ["model.vocab_size=3072", "model.d_model=48", "model.n_layers=1"]
    arguments = [ROOT / "scripts" / "plan.py", ROOT / "configs" / "quickstart.yaml", *small]
    done = run_script(*arguments, "train.batch_size=1", "train.max_minutes=null", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("parameters", "weights", "gradients", "optimizer", "activations", "GFLOP per token", "s per step",
                 "times the compute-optimal", "time  "):  # fmt: skip
        assert word in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1].startswith("recommendation     the run fits")
    assert list(tmp_path.iterdir()) == []
    done = run_script(*arguments, "--no-steps", "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert plan["tokens"] == 2400 * 14 * 176
    assert plan["optimal_tokens"] == 20 * plan["parameters"]
    assert "step_s" not in plan
    done = run_script(
        *arguments[:2],
        "model.vocab_size=1000",
        "train.offload_activations=true",
        "train.device=cpu",
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: train.offload_activations needs a CUDA GPU")


def test_planned_memory_matches_the_training(train_args, run_script, tmp_path):
    """The memory that a plan measures is what the training then reports."""
    larger = [
        "model.d_model=256",
        "model.n_layers=4",
        "train.batch_size=8",
        "data.seq_len=128",
        "train.max_steps=2",
    ]
    overrides = [*train_args[2:], *larger, "train.eval_every=null", f"run.dir={tmp_path / 'run'}"]
    done = run_script(ROOT / "scripts" / "plan.py", train_args[1], *overrides, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    done = run_script(train_args[0], train_args[1], *overrides)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    peak = max(line["peak_memory_bytes"] for line in lines if "train_loss" in line)
    config = ["data.source=text", f"data.path={tmp_path / 'my.txt'}"]
    (tmp_path / "my.txt").write_text("a few words of mine\n" * 200)
    done = run_script(ROOT / "scripts" / "plan.py", ROOT / "configs" / "chars.yaml", *config,
                      "model.d_model=48", "train.max_minutes=null", "train.batch_size=1", f"data.cache_dir={tmp_path}",
                      "--no-steps", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout)
    assert own["epochs"] == own["steps"] / 15  # 95 % of 4,000 characters in sequences of 256
    assert "times and memorize it" in own["recommendation"][1]
    assert plan["measured_peak_bytes"] == pytest.approx(
        peak, rel=0.25
    )  # of a process, whose malloc is not exact


def test_the_tokens_of_a_plan_are_those_that_are_learned(tmp_path):
    """Not the padding behind documents."""
    rows = [json.dumps({"text": f"row {i} " * (i % 5 + 1)}) for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    overrides = [
        "data.source=jsonl",
        f"data.path={tmp_path / 'rows.jsonl'}",
        f"data.cache_dir={tmp_path}",
    ]
    overrides += [
        "data.packing=documents",
        "data.tokenizer=byte",
        "data.seq_len=64",
        "train.batch_size=1",
    ]
    config = load_config(
        ROOT / "tests" / "fixtures" / "base.yaml", [*overrides, "data.max_documents=null"]
    )
    sequences = PackedDataset(prepare_training_data(config, None).train, 64, "documents")
    steps = 3 * len(sequences)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_steps": steps})}
    )
    plan = make_plan(config, measure=False)
    n_targets = sum(int((sequences[i][1] != IGNORE_INDEX).sum()) for i in range(len(sequences)))
    assert n_targets < 0.95 * 64 * len(sequences)
    assert plan["epochs"] == 3
    assert plan["tokens"] == 3 * n_targets


def test_a_text_shorter_than_a_window_is_refused_as_the_training_does(tmp_path):
    (tmp_path / "tiny.txt").write_text("A text of a few words, no more.")
    overrides = [f"data.path={tmp_path / 'tiny.txt'}", f"data.cache_dir={tmp_path}"]
    with pytest.raises(UserError, match="the training split has .* tokens, but data.seq_len=256"):
        make_plan(load_config(ROOT / "configs" / "chars.yaml", overrides), measure=False)


def test_a_run_that_does_not_fit_is_not_measured(train_args, monkeypatch, capsys):
    """Its steps could take the memory of every program of the machine."""
    config = load_config(train_args[1], train_args[2:])
    assert "step_s" in make_plan(config)
    assert "measuring speed and memory in four steps" in capsys.readouterr().err
    monkeypatch.setattr(plan_module, "usable_fraction", lambda device: 0.0)
    plan = make_plan(config)
    assert "step_s" not in plan
    assert "the run does not fit" in plan["recommendation"][0]
    assert "not measuring the speed, as the run does not fit" in capsys.readouterr().err
