"""Real trainings for tests: start, kill, go on, and compare to the last bit."""

import json
import subprocess
import sys
import time

from conftest import ROOT

from thinker import checkpoint


def start(*command, stderr=subprocess.PIPE):
    """A training as a process of its own, left to run."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, text=True
    )


def wait_for(condition, process, seconds=120):
    """Until condition() is true, looking all the time. False where the process ended before."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "it never came"
    return True


def metrics(run):
    """The whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(run):
    """How far the steps in metrics.jsonl go."""
    return max([line["step"] for line in metrics(run) if "train_loss" in line], default=0)


def steps(run):
    """The steps that there are checkpoints of."""
    return [int(path.name.split("-")[1]) for path in checkpoint.list_checkpoints(run / "checkpoints")]


def debris(run):
    """What a process left among the checkpoints under hidden names."""
    return [path.name for path in (run / "checkpoints").glob(".*")]


EVERYWHERE_ELSE = ("elapsed_s", "tokens_per_second", "peak_memory_bytes", "data_wait")  # times, and what follows


def numbers(run):
    """What is logged but for times."""
    return [{key: value for key, value in line.items() if key not in EVERYWHERE_ELSE} for line in metrics(run)]


def assert_same(a, b, step):
    """Two runs have logged the same numbers, and are at the same bits after `step`."""
    ours, theirs = numbers(a), numbers(b)
    assert ours == theirs
    folders = [run / "checkpoints" / f"step-{step:08d}" for run in (a, b)]
    for name in ("model.safetensors", "training.safetensors"):
        left, right = (checkpoint.read_tensors(folder / name) for folder in folders)
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].numpy().tobytes() == right[key].numpy().tobytes(), key
    left, right = (checkpoint.read_json(folder / "state.json") for folder in folders)
    for state in (left, right):
        del state["elapsed_s"]
        del state["settings"]["run"]["dir"]
    assert left == right
