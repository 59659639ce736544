"""Saves in the background: on a slow disk, on a full one, and if the process is killed meanwhile."""

import signal

import pytest
from conftest import run_script
from training_runs import (
    assert_same_tensors,
    checkpoint_steps,
    last_step,
    metrics_without_times,
    temporary_files,
)

from thinker import checkpoint

STEPS, EVERY = 12, 4
OPTIONS = [
    f"train.max_steps={STEPS}",
    f"train.save_every={EVERY}",
    f"train.eval_every={EVERY}",
    "train.log_every=1",
    "train.async_save=true",
]

# Runs train.py so that each access to a hidden folder of a checkpoint does something first:
# "slow": waits until the run has trained for three more steps, as a disk that takes that long;
# "full": fails, and leaves a file; "kill": ends the process after it has been slow.
HOOK = """
import errno, os, re, runpy, signal, sys, threading, time

hidden, action, metrics = sys.argv[1:4]
sys.argv = sys.argv[4:]
in_hook = threading.local()


def trained_steps():
    with open(metrics) as file:
        return max((int(step) for step in re.findall(r'"step": (\\d+)', file.read())), default=0)


def hook(event, arguments):
    found = [re.search(hidden, str(argument)) for argument in arguments]
    steps = [int(match[1]) for match in found if match]
    if event != "open" or not steps or getattr(in_hook, "active", False):
        return
    if action == "full":
        if not arguments[2] & os.O_CREAT:
            return
        open(os.path.join(os.path.dirname(metrics), "failed"), "w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if threading.current_thread() is threading.main_thread():
        print("the loop itself writes", file=sys.stderr)
        os._exit(99)
    in_hook.active = True
    deadline = time.monotonic() + 300
    while trained_steps() < steps[0] + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    in_hook.active = False
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(hook)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Holds the loop in the step after a save until that save has failed and has cleaned up.
WAIT = """
import time
from pathlib import Path

from thinker import CALLBACKS, Callback


class WaitForFailure(Callback):
    def __init__(self, run):
        self.run = Path(run)

    def on_step_end(self, info):
        deadline = time.monotonic() + 300
        while info.step == 201 and not self.has_failed() and time.monotonic() < deadline:
            time.sleep(0.01)

    def has_failed(self):
        is_clean = not list((self.run / "checkpoints").glob(".*"))
        return (self.run / "failed").exists() and is_clean


CALLBACKS.register("wait_for_failure", lambda settings: WaitForFailure(settings.run.dir))
"""


@pytest.fixture(scope="module")
def whole(train_args, tmp_path_factory):
    """The run that saves in the foreground."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = run_script(*train_args, f"run.dir={run}", *OPTIONS, "train.async_save=false")
    assert done.returncode == 0, done.stderr
    return run


def train(train_args, run, *options, hidden="", action=""):
    """Train with a hook for the hidden folders that match, if any."""
    command = [*train_args, f"run.dir={run}", *OPTIONS, *options]
    if action:
        script = run.parent / "hook.py"
        script.write_text(HOOK)
        command = [script, hidden, action, run / "metrics.jsonl", *command]
    return run_script(*command)


def assert_same_numbers(whole, run):
    """All but the setting of async_save."""
    assert metrics_without_times(whole) == metrics_without_times(run)
    assert_same_tensors(whole, run, STEPS)


def check_resumed(train_args, run, whole):
    """What is there is whole, and the next start ends at the bits of a run in the foreground."""
    for kind in ("step", "best"):
        for folder in checkpoint.list_checkpoints(run / "checkpoints", kind):
            checkpoint.verify(folder)
    done = train(train_args, run)
    assert done.returncode == 0, done.stderr
    assert_same_numbers(whole, run)
    assert temporary_files(run) == []


def test_training_goes_on_while_a_slow_disk_writes(train_args, tmp_path, whole):
    """Both checkpoints of a step: the loop waits neither for the best one nor for the newest."""
    run = tmp_path / "run"
    done = train(train_args, run, hidden=r"\.(?:best|step)-0*(4)\.tmp", action="slow")
    assert done.returncode == 0, done.stderr
    assert_same_numbers(whole, run)
    names = {path.name for path in (whole / "checkpoints").iterdir()}
    assert {path.name for path in (run / "checkpoints").iterdir()} == names


@pytest.mark.parametrize("kind", ["best", "step"])
def test_a_kill_while_training_goes_on(train_args, tmp_path, whole, kind):
    run = tmp_path / "run"
    done = train(train_args, run, hidden=rf"\.{kind}-0*(8)\.tmp", action="kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert last_step(run) >= EVERY * 2 + 3
    assert checkpoint_steps(run) == [EVERY]
    assert len(temporary_files(run)) == 1
    check_resumed(train_args, run, whole)


def test_a_failed_save_ends_the_run_before_the_next_one(train_args, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "waits.py").write_text(WAIT)
    script, base, *overrides = train_args
    config = tmp_path / "config.yaml"
    config.write_text(base.read_text() + "\nextensions: [waits]\n")
    options = ["train.callbacks=[wait_for_failure]"]
    options += ["train.max_steps=400", "train.save_every=200", "train.eval_every=200"]
    command = [script, config, *overrides]
    done = train(command, run, *options, hidden=r"\.step-0*(200)\.tmp", action="full")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: the disk is full")
    assert "Traceback" not in done.stderr
    assert 200 <= last_step(run) < 399
    assert checkpoint_steps(run) == temporary_files(run) == []


def test_the_last_save_is_waited_for(train_args, tmp_path):
    """Its failure is the run's."""
    run = tmp_path / "run"
    done = train(train_args, run, hidden=r"\.step-0*(12)\.tmp", action="full")
    assert done.returncode == 1
    assert "error: the disk is full" in done.stderr
    assert checkpoint_steps(run) == [4, 8]
