"""SIGTERM at random moments loses no step; a second signal, a closed terminal and a broken pipe are
no accidents."""

import fcntl
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from conftest import ROOT, run_script, start_script
from training_runs import (
    assert_same_run,
    checkpoint_steps,
    last_step,
    read_metrics,
    temporary_files,
    wait_for,
)

from thinker.runtime.process import interrupts
from thinker.training.signals import SignalHandler

LONG = ["train.max_steps=100000", "train.eval_every=null", "train.save_every=null",
        "train.fit_bigrams=off"]  # fmt: skip


def test_sigterm_at_random_moments_loses_no_step(train_args, tmp_path, stress):
    """One run that is stopped again and again, in steps, evaluations and saves, against one that is
    not."""
    rng = random.Random(4)
    # Without a falling rate and a fit before the first step, which depend on max_steps, the end may
    # be moved.
    options = ["train.max_steps=10000", "train.decay_fraction=0", "train.eval_every=3", "train.save_every=4",
               "train.fit_bigrams=off", "model.dropout=0.1"]  # fmt: skip
    run, stopped = tmp_path / "parts", 0
    while stopped < (20 if stress else 3):
        before = last_step(run)
        process = start_script(*train_args, f"run.dir={run}", *options)
        reached = before + rng.randrange(1, 12)
        assert wait_for(lambda reached=reached: last_step(run) >= reached, process)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
        assert process.returncode == 143, stderr
        assert "run the same command again to resume" in stderr
        assert (
            checkpoint_steps(run)[-1] == last_step(run) > before
        )  # every step that was made is kept
        assert not temporary_files(run)
        stopped += 1
    whole, end = tmp_path / "whole", last_step(run) + 5
    for each in (run, whole):
        done = run_script(*train_args, f"run.dir={each}", *options, f"train.max_steps={end}")
        assert done.returncode == 0, done.stderr
    assert_same_run(whole, run, end)
    print(f"{stopped} of {stopped} stopped without loss")


STEP_THAT_NEVER_ENDS = """
import hashlib, runpy, signal, sys, time
from pathlib import Path
from thinker.model import Thinker

folder = Path(sys.argv[1])
sys.argv = sys.argv[2:]


def forward(*arguments, **options):
    (folder / "inside").touch()
    while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        time.sleep(0.01)  # the first signal comes here
    (folder / "without Python").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour in which no Python code runs


Thinker.forward = forward
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_second_signal_leaves_at_once(train_args, tmp_path):
    """Even while Python has no turn, inside a step that takes very long."""
    run, script = tmp_path / "run", tmp_path / "never_ends.py"
    script.write_text(STEP_THAT_NEVER_ENDS)
    process = start_script(script, tmp_path, *train_args, f"run.dir={run}", *LONG)
    assert wait_for((tmp_path / "inside").exists, process), process.output()
    process.send_signal(signal.SIGTERM)
    assert wait_for((tmp_path / "without Python").exists, process), process.output()
    assert "repeat to stop at once" in process.output()[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    assert not (run / "metrics.jsonl").exists()


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    """As from timeout(1), which signals the process and then its group."""
    monkeypatch.setattr(interrupts, "TWICE_SECONDS", 1.0)
    second = threading.Event()

    def send_again():
        while not first_arrived.wait(0.001):
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
                signal.raise_signal(signal.SIGINT)
                second.set()
                return

    first_arrived, sender = threading.Event(), threading.Thread(target=send_again)
    with SignalHandler() as handler:
        sender.start()
        signal.raise_signal(signal.SIGTERM)
        first_arrived.set()
        sender.join()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert second.is_set()
    assert handler.number == signal.SIGTERM


EVALUATION_THAT_WAITS = """
import runpy, signal, sys, time
from pathlib import Path
from thinker.model import Thinker

folder, forward = Path(sys.argv[1]), Thinker.forward
sys.argv = sys.argv[2:]


def wait_for_the_signal(model, *arguments, **options):
    if not model.training:
        (folder / "inside").touch()
        while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            time.sleep(0.01)  # the signal comes here
    return forward(model, *arguments, **options)


Thinker.forward = wait_for_the_signal
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_evaluation_is_left_and_made_again(train_args, tmp_path):
    """The signal does not wait for the end of the validation set, and the loss comes after
    resuming."""
    run, script = tmp_path / "run", tmp_path / "waits.py"
    script.write_text(EVALUATION_THAT_WAITS)
    options = ["train.max_steps=7", "train.eval_every=5", "train.save_every=null", "data.val_fraction=0.9",
               "data.seq_len=8", "train.micro_batch_size=1"]  # fmt: skip
    process = start_script(script, tmp_path, *train_args, f"run.dir={run}", *options)
    assert wait_for((tmp_path / "inside").exists, process), process.output()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert checkpoint_steps(run) == [5]
    assert not [line for line in read_metrics(run) if "val_loss" in line]
    state = json.loads((run / "checkpoints" / "step-00000005" / "state.json").read_text())
    assert state["evaluated_at"] is None
    done = run_script(*train_args, f"run.dir={run}", *options, "train.micro_batch_size=4")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(run) if "val_loss" in line] == [5, 7]


def test_a_closed_terminal_saves(train_args, tmp_path):
    """A real terminal whose other end goes away: SIGHUP, and nobody to write to."""
    run = tmp_path / "run"
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, *map(str, train_args), f"run.dir={run}", *LONG])
    fcntl.ioctl(
        terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0)
    )  # or the bar would show nothing
    while last_step(run) < 5:
        os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert checkpoint_steps(run) == [last_step(run)]


@pytest.mark.stress
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_reader_that_the_same_signal_ended_takes_nothing_along(train_args, tmp_path, number):
    """`train.py 2>&1 | tee log` and Ctrl-C, which ends tee first."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, *map(str, train_args), f"run.dir={run}", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while last_step(run) < 5:
        os.read(process.stdout.fileno(), 65536)
    process.stdout.close()
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert checkpoint_steps(run) == [last_step(run)]


def test_nohup_is_obeyed(train_args, tmp_path):
    run = tmp_path / "run"
    process = start_script(*train_args, f"run.dir={run}", *LONG, ignored=[signal.SIGHUP])
    assert wait_for(lambda: last_step(run) >= 3, process)
    process.send_signal(signal.SIGHUP)
    before = last_step(run)
    assert wait_for(lambda: last_step(run) >= before + 10, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130


@pytest.mark.stress
def test_ctrl_c_while_compiling_saves(train_args, tmp_path):
    """A terminal sends it to the compiler, too; the evaluation compiles a second time in the midst
    of the run."""
    run = tmp_path / "run"
    options = ["train.compile=true", "train.eval_every=3", "train.save_every=null", "train.max_steps=20",
               "model.dropout=0.1"]  # fmt: skip
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    command = [sys.executable, *map(str, train_args), f"run.dir={run}", *options]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def compiling():
        names = subprocess.run(
            ["ps", "-o", "comm=", "-g", str(process.pid)], capture_output=True, text=True
        ).stdout
        return last_step(run) >= 3 and "cc1plus" in names

    assert wait_for(compiling, process)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert checkpoint_steps(run) == [last_step(run)]
    whole = tmp_path / "whole"
    for each in (run, whole):
        done = run_script(*train_args, f"run.dir={each}", *options)
        assert done.returncode == 0, done.stderr
    assert_same_run(whole, run, 20)
