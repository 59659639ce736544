"""A real wandb, offline: what a training sends is what metrics.jsonl holds."""

import glob
import json
import re
import shlex
import signal

import pytest
from conftest import run_script, start_script
from training_runs import read_metrics, wait_for

BLOCK_BYTES = 32768  # wandb writes its offline file in blocks


@pytest.fixture(autouse=True)
def wandb_folders(tmp_path, monkeypatch):
    """wandb reads no settings of this machine, and leaves nothing outside tmp_path."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


def read_records(path):
    """The protobuf records of an offline file: a LevelDB log in blocks, whose records may be split
    into parts."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < 7:  # too few bytes for a header: padding
            position += left_in_block
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield record
            record = b""


def read_offline(folder):
    """The run's id, and its history as {step: {key: value}}."""
    from wandb.proto import wandb_internal_pb2

    history, run_id = {}, None
    for data in read_records(next(folder.glob("*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            line = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            history.setdefault(line.pop("_step", record.history.step.num), {}).update(line)
    return run_id, history


def read_runs(run):
    """What read_offline() gives for each of the run's trainings, oldest first."""
    return [read_offline(folder) for folder in sorted((run / "wandb").glob("offline-run-*"))]


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
def test_after_a_kill_no_step_is_sent_twice_and_only_the_newest_are_lost(
    train_args, tmp_path, save_every
):
    """At most the steps that wandb had received but not yet written are lost; metrics.jsonl has
    them."""
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
    assert 0 < max(first) <= last_sent
    assert second.keys() == set(range(last_sent + 1, end + 1))
    assert_equals_metrics(first | second, run)
