"""A run that is killed and goes on is, to the last bit, the run that was not."""

import signal

import pytest
from conftest import run_script, start_script
from training_runs import (
    assert_same_run,
    checkpoint_steps,
    kill_inside_checkpoints,
    last_step,
    written_samples,
)

# everything that could differ: dropout, micro-batches, evaluations, saves in between, a falling
# rate
HARD = [
    "model.dropout=0.1",
    "train.micro_batch_size=2",
    "train.max_steps=20",
    "train.eval_every=3",
    "train.save_every=7",
    "train.keep_last=9",
    "train.sample_every=auto",
    "train.warmup_steps=3",
]
CASES = [
    pytest.param(
        precision,
        compiled,
        optimizer,
        log_every,
        background,
        id=f"{precision}-{name}-{optimizer}",
        marks=[pytest.mark.stress] if compiled or optimizer == "adamw" else [],
    )
    for precision, compiled, name, optimizer, log_every, background in [
        ("fp32", False, "eager", "muon", 1, False),
        ("bf16", False, "eager-background", "muon", 4, True),
        ("fp32", False, "eager", "adamw", 3, False),
        ("fp32", True, "compiled", "muon", 1, False),
        ("bf16", True, "compiled", "muon", 1, False),
    ]
]


@pytest.mark.parametrize(("precision", "compiled", "optimizer", "log_every", "background"), CASES)
def test_seven_steps_a_kill_and_the_rest(
    train_args, tmp_path, precision, compiled, optimizer, log_every, background
):
    options = [*HARD, f"train.precision={precision}", f"train.compile={str(compiled).lower()}",
               f"optimizer.name={optimizer}", f"train.log_every={log_every}",
               f"train.async_save={str(background).lower()}"]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run_script(*train_args, f"run.dir={whole}", *options)
    assert done.returncode == 0, done.stderr
    command = [*train_args, f"run.dir={parts}", *options]
    process = start_script(
        *kill_inside_checkpoints(tmp_path, "saving", 8, 0), *command
    )  # the second checkpoint
    assert process.wait() == -signal.SIGKILL
    assert checkpoint_steps(parts) == [7]
    assert last_step(parts) < 20
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 7" in done.stderr
    assert_same_run(whole, parts, 20)
    assert written_samples(whole) == written_samples(parts) != ""


def test_the_same_config_twice(train_args, tmp_path):
    options = ["train.deterministic=true", "model.dropout=0.1", "train.precision=auto"]
    for name in "ab":
        done = run_script(*train_args, f"run.dir={tmp_path / name}", *options)
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "a", tmp_path / "b", 6)
