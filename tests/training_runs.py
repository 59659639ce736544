"""Real training runs for tests: wait for what they write, and compare them to the last bit."""

import json
import time

from safetensors.torch import load_file

from thinker import checkpoint

TIMING_KEYS = (
    "elapsed_s",
    "tokens_per_second",
    "trained_tokens_per_second",
    "flops_per_second",
    "peak_memory_bytes",
    "data_wait",
)


def wait_for(condition, process=None, seconds=600):
    """Wait until condition() is true; returns False if the process ends before that.

    `seconds` only guards against a test that hangs: no test depends on how long something takes.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the event that the test waits for did not come"
        time.sleep(0.005)
    return True


def read_metrics(run):
    """The complete lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_losses(run):
    """{step: training loss}"""
    return {line["step"]: line["train_loss"] for line in read_metrics(run) if "train_loss" in line}


def last_step(run):
    """The last step in metrics.jsonl, 0 if there is none."""
    return max(train_losses(run), default=0)


def checkpoint_steps(run):
    """The steps that have a checkpoint."""
    return [
        int(path.name.split("-")[1]) for path in checkpoint.list_checkpoints(run / "checkpoints")
    ]


def temporary_files(run):
    """What a process has left among the checkpoints under hidden names."""
    return [path.name for path in (run / "checkpoints").glob(".*")]


def metrics_without_times(run):
    return [
        {key: value for key, value in line.items() if key not in TIMING_KEYS}
        for line in read_metrics(run)
    ]


def written_samples(run):
    """The text of samples.jsonl; "" if there is none."""
    path = run / "samples.jsonl"
    return path.read_text() if path.exists() else ""


def assert_same_tensors(a, b, step):
    """Two runs have the same weights and optimizer state after `step`, bit for bit."""
    folders = [run / "checkpoints" / f"step-{step:08d}" for run in (a, b)]
    for name in ("model.safetensors", "training.safetensors"):
        left, right = (load_file(folder / name) for folder in folders)
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].numpy().tobytes() == right[key].numpy().tobytes(), key


def assert_same_run(a, b, step):
    """Two runs have logged the same numbers, and are at the same bits after `step`."""
    ours, theirs = metrics_without_times(a), metrics_without_times(b)
    assert ours == theirs
    assert_same_tensors(a, b, step)
    states = [
        checkpoint.read_json(run / "checkpoints" / f"step-{step:08d}" / "state.json")
        for run in (a, b)
    ]
    for state in states:
        del state["elapsed_s"]
        del state["settings"]["run"]["dir"]
    assert states[0] == states[1]


KILL = """
import os, re, runpy, signal, sys

hidden, first_step, n_events = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = sys.argv[4:]
events = 0


def kill(event, arguments):
    global events
    found = [re.search(hidden, str(argument)) for argument in arguments]
    if any(match and int(match[1]) >= first_step for match in found):
        events += 1
        if events > n_events:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_inside_checkpoints(folder, kind, first_step, n_events):
    """What to put before the arguments of train.py, so that it kills itself "saving" or "removing"
    a checkpoint.

    It is the checkpoint of `first_step` or a later one, after `n_events` accesses to its hidden
    folder.
    """
    script = folder / "kill.py"
    script.write_text(KILL)
    hidden = {"saving": r"\.step-(\d+)\.(?:\d+\.)?tmp", "removing": r"\.step-(\d+)\.removed"}[kind]
    return [script, hidden, first_step, n_events]
