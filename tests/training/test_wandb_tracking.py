"""A real wandb, offline: what a training sends is what metrics.jsonl holds."""

import glob
import json
import re
import shlex
import shutil
import signal

import pytest
from conftest import run_script, start_script
from tracker_readers import BLOCK_BYTES, read_runs
from training_runs import last_step, read_metrics, wait_for


@pytest.fixture(autouse=True)
def wandb_folders(tmp_path, monkeypatch):
    """wandb reads no settings of this machine, and leaves nothing outside tmp_path."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


def assert_equals_metrics(sent, run):
    """The steps that were sent hold the values of metrics.jsonl."""
    for line in read_metrics(run):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            if key in line and line["step"] in sent:
                assert sent[line["step"]][key] == line[key], (line["step"], key)


def test_offline_losses_equal_metrics(train_args, tmp_path):
    """And the steps trained while tracking was disabled are sent once it is enabled."""
    run = tmp_path / "run"
    for n_steps, mode in ((2, "disabled"), (4, "offline"), (6, "offline")):
        done = run_script(
            *train_args, f"run.dir={run}", f"tracking.wandb={mode}", f"train.max_steps={n_steps}"
        )
        assert done.returncode == 0, done.stderr
        sync = re.findall(r"upload the log to Weights & Biases: wandb sync (.*)", done.stderr)
        assert len(sync) == (mode == "offline")
    (first_id, first), (second_id, second) = read_runs(run)
    assert (
        len(glob.glob(shlex.split(sync[0])[0])) == 2
    )  # one run in two logs, which the command sends in order
    assert first_id == second_id  # a resumed run keeps its id
    assert set(first) == {1, 2, 3, 4}
    assert set(second) == {5, 6}
    assert len(read_metrics(run)) > 6
    assert_equals_metrics(first | second, run)


@pytest.mark.parametrize(
    "saved", ['{"wandb_id": "abc", "last_step": Infinity}', "[" * 100_000, "7"]
)
def test_a_damaged_tracking_file_begins_anew(train_args, tmp_path, saved):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking.json").write_text(saved)
    done = run_script(
        *train_args, f"run.dir={tmp_path / 'run'}", "tracking.wandb=offline", "train.max_steps=1"
    )
    assert done.returncode == 0, done.stderr


def test_a_project_that_wandb_refuses_is_named(train_args, tmp_path):
    options = ["tracking.wandb=offline", "tracking.project=a/b", "train.max_steps=1"]
    done = run_script(*train_args, f"run.dir={tmp_path / 'run'}", *options)
    assert done.returncode == 2
    assert "wandb cannot start (tracking.project=a/b" in done.stderr
    assert "offline needs no account" not in done.stderr


@pytest.mark.parametrize(
    "save_every",
    [
        pytest.param(20, id="from a checkpoint"),
        pytest.param(100000, id="from the beginning", marks=pytest.mark.stress),
    ],
)
def test_after_a_kill_no_step_is_sent_twice_and_none_is_lost(train_args, tmp_path, save_every):
    """Those that wandb had received but not yet written are sent again, from metrics.jsonl or
    trained again."""
    run = tmp_path / "run"
    # Without a falling rate, which would follow max_steps, the end may be moved.
    options = ["tracking.wandb=offline", "train.decay_fraction=0", f"train.save_every={save_every}",
               "train.eval_every=50"]  # fmt: skip
    process = start_script(*train_args, f"run.dir={run}", *options, "train.max_steps=100000")
    files = (run / "wandb").glob
    assert wait_for(
        lambda: any(f.stat().st_size >= BLOCK_BYTES for f in files("offline-run-*/*.wandb")),
        process,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    last_sent = json.loads((run / "tracking.json").read_text())["last_step"]
    end = max(last_sent, max(line["step"] for line in read_metrics(run))) + 3
    done = run_script(*train_args, f"run.dir={run}", *options, f"train.max_steps={end}")
    assert done.returncode == 0, done.stderr
    (first_id, first), (second_id, second) = read_runs(run)
    assert first_id == second_id
    assert first.keys() == set(range(1, max(first) + 1))  # what wandb has written has no gap
    assert 0 < max(first) < last_sent  # the kill has lost some
    assert second.keys() == set(range(max(first) + 1, end + 1))
    assert_equals_metrics(first | second, run)
    assert len(read_metrics(run)) > end


def kill_after(n_steps, train_args, run, *options):
    """Train until so many more steps are logged, and kill the process."""
    end = last_step(run) + n_steps
    process = start_script(*train_args, f"run.dir={run}", *options, "train.max_steps=100000")
    assert wait_for(lambda: last_step(run) >= end, process)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("n_kills", [1, 2])
def test_a_kill_before_wandb_has_written_anything_loses_nothing(train_args, tmp_path, n_kills):
    """Its file then has no step at all, also after steps that were sent in full before."""
    run = tmp_path / "run"
    options = ["tracking.wandb=offline", "train.decay_fraction=0", "train.save_every=3",
               "train.eval_every=null"]  # fmt: skip
    done = run_script(*train_args, f"run.dir={run}", *options, "train.max_steps=4")
    assert done.returncode == 0, done.stderr
    for _ in range(n_kills):
        kill_after(8, train_args, run, *options)
    end = last_step(run) + 2
    done = run_script(*train_args, f"run.dir={run}", *options, f"train.max_steps={end}")
    assert done.returncode == 0, done.stderr
    sent = [history for _, history in read_runs(run)]
    assert len(sent) == n_kills + 2
    assert set(sent[0]) == {1, 2, 3, 4}
    steps = [step for history in sent for step in sorted(history)]
    assert steps == list(range(1, end + 1))  # each once, in order
    everything = {}
    for history in sent:
        everything |= history
    assert_equals_metrics(everything, run)


def test_a_log_that_was_uploaded_and_removed_is_not_sent_again(train_args, tmp_path):
    """wandb sync --clean removes what it has uploaded."""
    run = tmp_path / "run"
    for n_steps in (3, 6):
        options = ["tracking.wandb=offline", f"train.max_steps={n_steps}"]
        done = run_script(*train_args, f"run.dir={run}", *options)
        assert done.returncode == 0, done.stderr
        ((_, sent),) = read_runs(run)
        assert set(sent) == set(range(n_steps - 2, n_steps + 1))
        shutil.rmtree(run / "wandb")


def test_a_log_that_cannot_be_read_is_named(train_args, tmp_path):
    run = tmp_path / "run"
    options = ["tracking.wandb=offline", "train.decay_fraction=0", "train.save_every=3"]
    kill_after(8, train_args, run, *options)
    (log,) = (run / "wandb").glob("offline-run-*/*.wandb")
    log.write_bytes(b"no log of wandb")
    end = last_step(run) + 2
    done = run_script(*train_args, f"run.dir={run}", *options, f"train.max_steps={end}")
    assert done.returncode == 0, done.stderr
    assert f"{log} cannot be read: it is no log of wandb; its newest" in done.stderr
