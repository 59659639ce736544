"""A real wandb, offline: what a training sends is what metrics.jsonl holds."""

import json

from conftest import run_script


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


def test_offline_losses_equal_metrics(tiny, tmp_path):
    run = tmp_path / "run"
    quiet = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path)}
    done = run_script(*tiny, f"run.dir={run}", "tracking.wandb=offline", "train.max_steps=4", **quiet)
    assert done.returncode == 0, done.stderr
    done = run_script(*tiny, f"run.dir={run}", "tracking.wandb=offline", "train.max_steps=6", **quiet)
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
