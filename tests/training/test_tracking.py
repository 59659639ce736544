"""A real wandb, offline: what a training sends is what metrics.jsonl holds."""

import json
import signal

import pytest
from conftest import run_script, start_script
from training_runs import last_step, read_metrics, wait_for


def records(path):
    """The protobuf records of an offline file: a LevelDB log (blocks of 32 KiB, each record perhaps in parts)."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block that no header fits into
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_offline(folder):
    """The run's id, and its history as {step: {key: value}}."""
    from wandb.proto import wandb_internal_pb2

    history, run_id = {}, None
    for data in records(next(folder.glob("*.wandb"))):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            line = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            history.setdefault(line.pop("_step", record.history.step.num), {}).update(line)
    return run_id, history


def test_offline_losses_equal_metrics(train_args, tmp_path):
    run = tmp_path / "run"
    quiet = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path)}
    done = run_script(*train_args, f"run.dir={run}", "tracking.wandb=offline", "train.max_steps=4", **quiet)
    assert done.returncode == 0, done.stderr
    done = run_script(*train_args, f"run.dir={run}", "tracking.wandb=offline", "train.max_steps=6", **quiet)
    assert done.returncode == 0, done.stderr
    parts = sorted((run / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    (first_id, first), (second_id, second) = map(read_offline, parts)
    assert first_id == second_id  # a resumed run keeps its id
    assert set(first) == {1, 2, 3, 4}
    assert set(second) == {5, 6}
    sent = first | second
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > 6
    for line in lines:
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            if key in line:
                assert sent[line["step"]][key] == line[key], (line["step"], key)


@pytest.mark.parametrize("save_every", [4, 100], ids=["from a checkpoint", "from the beginning"])
def test_after_a_kill_no_step_is_sent_twice_and_only_the_newest_are_lost(train_args, tmp_path, save_every, monkeypatch):
    """Lost are at most the steps that wandb had been handed and had not written yet; metrics.jsonl has them."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    run = tmp_path / "run"
    options = ["tracking.wandb=offline", "train.max_steps=300", f"train.save_every={save_every}", "train.eval_every=50"]
    process = start_script(*train_args, f"run.dir={run}", *options)
    assert wait_for(lambda: last_step(run) >= 203, process)  # enough to fill a block of wandb's file
    process.send_signal(signal.SIGKILL)
    process.wait()
    handed_over = json.loads((run / "tracking.json").read_text())["last_step"]
    done = run_script(*train_args, f"run.dir={run}", *options)
    assert done.returncode == 0, done.stderr
    parts = sorted((run / "wandb").glob("offline-run-*"))
    (first_id, first), (second_id, second) = map(read_offline, parts)
    assert first_id == second_id
    assert first.keys() == set(range(1, max(first) + 1))  # what wandb has written has no gap
    assert 0 < max(first) <= handed_over
    assert second.keys() == set(range(handed_over + 1, 301))
    sent = first | second
    for line in read_metrics(run):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            if key in line and line["step"] in sent:
                assert sent[line["step"]][key] == line[key], (line["step"], key)


def test_what_was_trained_while_wandb_was_off_is_sent_when_it_is_on(train_args, tmp_path, monkeypatch):
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    run = tmp_path / "run"
    assert run_script(*train_args, f"run.dir={run}", "train.max_steps=4").returncode == 0
    assert run_script(*train_args, f"run.dir={run}", "tracking.wandb=offline", "train.max_steps=6").returncode == 0
    _, sent = read_offline(next((run / "wandb").glob("offline-run-*")))
    assert set(sent) == set(range(1, 7))
