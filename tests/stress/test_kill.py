"""SIGKILL anywhere costs at most the steps since the last save."""

import os
import random
import re
import shutil
import signal
import time

import pytest
from conftest import run_script
from training_runs import debris, last_step, start, steps, wait_for

from thinker import checkpoint

STEPS, EVERY = 30, 2
OPTIONS = [f"train.max_steps={STEPS}", f"train.save_every={EVERY}", "train.eval_every=5", "model.dropout=0.1"]


@pytest.fixture(scope="module")
def whole(train_args, tmp_path_factory):
    """The run that nobody kills."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_script(*train_args, f"run.dir={run}", *OPTIONS).returncode == 0
    return run


def bits(run):
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


def kill_while_saving(run, process, at, files):
    """When the checkpoint of the first save from step `at` on holds so many files, under its temporary name."""
    folder = run / "checkpoints"

    def there():
        found = [p for p in folder.glob(".step-*.tmp") if int(re.findall(r"\d+", p.name)[0]) >= at]
        try:
            return bool(found) and len(os.listdir(found[0])) >= files
        except FileNotFoundError:
            return False  # it has just been renamed

    if wait_for(there, process):
        process.send_signal(signal.SIGKILL)


def kill_while_removing(run, process, at):
    folder = run / "checkpoints"
    if wait_for(lambda: steps(run) and steps(run)[-1] >= at and list(folder.glob(".*.removed")), process):
        process.send_signal(signal.SIGKILL)


def kill_between(run, process, at, delay):
    if wait_for(lambda: last_step(run) >= at, process):
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)


def test_every_restart_goes_on_from_a_whole_checkpoint_and_ends_alike(train_args, tmp_path, whole, stress):
    """60 of 60 with make prove: 30 while a checkpoint is being written, 10 while one is removed, 20 anywhere."""
    rng = random.Random(5)
    count = 60 if stress else 3
    inside = 0
    for trial in range(count):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        process = start(*train_args, f"run.dir={run}", *OPTIONS)
        at = rng.randrange(0, STEPS - 3)
        if trial % 6 in (0, 1, 3):
            kill_while_saving(run, process, at, rng.randrange(6))
        elif trial % 6 == 2:
            kill_while_removing(run, process, max(at, 5))
        else:
            kill_between(run, process, at, rng.random() * 0.05)
        said = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, said  # it was alive, and steps were left to do
        inside += bool(debris(run))
        before, kept = last_step(run), steps(run)
        for folder in checkpoint.list_checkpoints(run / "checkpoints"):
            checkpoint.verify(folder)  # what is there is whole
        done = run_script(*train_args, f"run.dir={run}", *OPTIONS)
        assert done.returncode == 0, done.stderr
        went_on = int((re.findall(r"resuming from step (\d+)", done.stderr) or [0])[0])
        if "is finished" in done.stderr:  # the kill came after the last save
            went_on = STEPS
        assert went_on == max(kept, default=0)
        assert before - went_on <= EVERY
        assert bits(run) == bits(whole), f"trial {trial}"
        assert not debris(run)
    print(f"{count} of {count} kills, {inside} of them inside a save")
    assert inside >= count // 4


def test_kills_during_background_saves(train_args, tmp_path, whole, stress):
    """There a checkpoint is whole one interval later at most, so two are the most that a kill costs."""
    rng = random.Random(6)
    options = [*OPTIONS, "train.async_save=true"]
    for trial in range(20 if stress else 1):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        process = start(*train_args, f"run.dir={run}", *options)
        kill_while_saving(run, process, rng.randrange(1, STEPS - 6), rng.randrange(5))
        assert process.wait() == -signal.SIGKILL
        before, kept = last_step(run), steps(run)
        done = run_script(*train_args, f"run.dir={run}", *options)
        assert done.returncode == 0, done.stderr
        assert before - max(kept, default=0) <= 2 * EVERY
        assert bits(run) == bits(whole), f"trial {trial}"
        assert not debris(run)
