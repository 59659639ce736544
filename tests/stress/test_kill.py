"""SIGKILL anywhere costs at most the steps since the last save."""

import random
import re
import shutil
import signal
import time

import pytest
from conftest import run_script, start_script
from training_runs import (
    checkpoint_steps,
    kill_inside_checkpoints,
    last_step,
    temporary_files,
    wait_for,
    written_samples,
)

from thinker import checkpoint

STEPS, EVERY = 30, 2
OPTIONS = [
    f"train.max_steps={STEPS}",
    f"train.save_every={EVERY}",
    "train.eval_every=5",
    "train.sample_every=auto",
    "model.dropout=0.1",
]


@pytest.fixture(scope="module")
def whole(train_args, tmp_path_factory):
    """The run that nobody kills."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_script(*train_args, f"run.dir={run}", *OPTIONS).returncode == 0
    return run


def bits(run):
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


def start_and_kill(command, run, kind, at, rng):
    """Start a training and kill it from step `at` on: while it saves or removes a checkpoint, or
    anywhere."""
    if kind != "anywhere":
        at, n_events = (
            (at, rng.randrange(6)) if kind == "saving" else (max(0, at - 6), rng.randrange(3))
        )
        process = start_script(*kill_inside_checkpoints(run.parent, kind, at, n_events), *command)
    else:
        process = start_script(*command)
        if wait_for(lambda: last_step(run) >= at, process):
            time.sleep(rng.random() * 0.05)
            process.kill()
    process.wait()
    return process


KINDS = ["saving", "saving", "removing", "saving", "anywhere", "anywhere"]


def test_every_restart_resumes_from_a_complete_checkpoint_and_ends_alike(
    train_args, tmp_path, whole, stress
):
    """60 kills with make prove: 30 while a checkpoint is being written, 10 while one is removed, 20
    anywhere."""
    rng = random.Random(5)
    count = 60 if stress else 3
    kills, inside = 0, 0
    while kills < count:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        kind, at = KINDS[kills % len(KINDS)], rng.randrange(0, STEPS - 5)
        process = start_and_kill([*train_args, f"run.dir={run}", *OPTIONS], run, kind, at, rng)
        if process.returncode == 0 and kind == "anywhere":
            continue  # on a busy machine it may end before we see it
        assert process.returncode == -signal.SIGKILL, process.output()
        kills += 1
        inside += bool(temporary_files(run))
        before, kept = last_step(run), checkpoint_steps(run)
        for folder in checkpoint.list_checkpoints(run / "checkpoints"):
            checkpoint.verify(folder)  # what is there is whole
        done = run_script(*train_args, f"run.dir={run}", *OPTIONS)
        assert done.returncode == 0, done.stderr
        resumed = int((re.findall(r"resuming from step (\d+)", done.stderr) or [0])[0])
        if "is finished" in done.stderr:  # the kill came after the last save
            resumed = STEPS
        assert resumed == max(kept, default=0)
        assert before - resumed <= EVERY
        assert bits(run) == bits(whole), f"kill {kills}"
        assert written_samples(run) == written_samples(whole)
        assert not temporary_files(run)
    print(f"{count} of {count} kills, {inside} of them inside a save or a removal")
    assert inside >= count // 4


def test_kills_during_background_saves(train_args, tmp_path, whole, stress):
    """There a checkpoint is whole one interval later at most, so two are the most that a kill
    costs."""
    rng = random.Random(6)
    options = [*OPTIONS, "train.async_save=true"]
    for trial in range(20 if stress else 1):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        command = [*train_args, f"run.dir={run}", *options]
        process = start_and_kill(command, run, "saving", rng.randrange(1, STEPS - 6), rng)
        assert process.returncode == -signal.SIGKILL, process.output()
        before, kept = last_step(run), checkpoint_steps(run)
        done = run_script(*command)
        assert done.returncode == 0, done.stderr
        assert before - max(kept, default=0) <= 2 * EVERY
        assert bits(run) == bits(whole), f"trial {trial}"
        assert written_samples(run) == written_samples(whole)
        assert not temporary_files(run)
