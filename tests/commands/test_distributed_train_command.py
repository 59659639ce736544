"""Trainings of several processes that are killed, stopped, hang, or do not start."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import rank_workers
import torch
from conftest import ROOT
from safetensors.torch import load_file
from training_runs import debris, last_step, numbers, steps

from thinker import checkpoint

CONFIG = """
model: {d_model: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1}
data: {source: tales, max_documents: 60, seq_len: 64, tokenizer: byte}
train: {max_steps: 60, batch_size: 8, eval_every: 30, save_every: 10, precision: fp32, compile: false, device: cpu,
  dist_timeout_s: 20}
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "config.yaml"
    path.write_text(CONFIG.replace("data: {", f"data: {{cache_dir: {path.parent / 'cache'}, "))
    return path


@pytest.fixture
def torchrun(tmp_path):
    """Start a training of two ranks under the real torchrun; what is left of it in the end is a failure."""
    started, log = [], tmp_path / "log"

    def start(*arguments, options=()):
        with log.open("w") as out:
            command = [*TORCHRUN, *options, *map(str, arguments)]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
        return started[-1], log

    yield start
    for process in started:
        left = [] if process.poll() is not None else ranks_of(process)
        process.kill()
        process.wait()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == [], log.read_text()


def ranks_of(process):
    """The process numbers of torchrun's ranks, rank 0 first."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        pids = [int(pid) for pid in children.read_text().split()]
        named = {pid: re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()) for pid in pids}
    except OSError:
        return []
    return sorted((pid for pid in pids if named[pid]), key=lambda pid: int(named[pid][1]))


def wait_for(condition, log, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(("rank", "parallel", "sharded"), [(0, "ddp", False), (1, "fsdp", True)])
def test_a_killed_rank_costs_only_time(torchrun, config, tmp_path, rank, parallel, sharded):
    form = [f"train.parallel={parallel}", f"train.save_sharded={str(sharded).lower()}"]
    run, calm = tmp_path / "run", tmp_path / "calm"
    process, log = torchrun("train.py", config, f"run.dir={run}", *form, options=["--max-restarts", "1"])
    wait_for(lambda: last_step(run) >= 24, log)
    first = ranks_of(process)
    os.kill(first[rank], signal.SIGKILL)
    assert process.wait(120) == 0, log.read_text()
    assert gone(first)
    begun = re.findall(r"resuming from step (\d+)", log.read_text())
    assert begun in (["20"], ["30"], ["40"])
    fork_server.together(2, rank_workers.train, str(config), [f"run.dir={calm}", *form])
    ours, theirs = (
        {path.name: load_file(path) for path in (folder / "checkpoints" / "step-00000060").glob("*.safetensors")}
        for folder in (run, calm)
    )
    assert ours.keys() == theirs.keys()
    for file in theirs:
        assert ours[file].keys() == theirs[file].keys()
        assert all(torch.equal(ours[file][name], tensor) for name, tensor in theirs[file].items())
    assert numbers(run) == numbers(calm)


@pytest.mark.parametrize("told", [0, 1, "torchrun"])
def test_a_signal_to_any_rank_saves_on_all_at_the_same_step(torchrun, config, tmp_path, told):
    run = tmp_path / "run"
    process, log = torchrun(
        "train.py",
        config,
        f"run.dir={run}",
        "train.max_steps=100000",
        "train.save_every=null",
        "train.save_sharded=true",
    )
    wait_for(lambda: last_step(run) >= 10, log)
    pids, start = ranks_of(process), time.monotonic()
    os.kill(process.pid if told == "torchrun" else pids[told], signal.SIGTERM)
    assert process.wait(60) != 0
    assert time.monotonic() - start < 20  # torchrun would kill them after 30
    assert gone(pids)
    (step,) = steps(run)
    assert step == last_step(run) >= 10
    assert log.read_text().count(f"saved step {step} in {run}") == 1
    folder = run / "checkpoints" / f"step-{step:08d}"
    checkpoint.verify(folder)
    assert len(list(folder.glob("shard-*"))) == 2  # both have written their part
    assert debris(run) == []


def test_a_mistake_is_shown_once_and_ends_all(torchrun, config, tmp_path):
    process, log = torchrun("train.py", config, f"run.dir={tmp_path / 'run'}", "train.batch_size=7")
    assert process.wait(60) != 0
    errors = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert errors == [
        "error: train.batch_size (7) is split over 2 ranks: it must be a multiple of 2, such as 6 or 8; "
        "7 goes with so many ranks: 1, 7"
    ]
    assert not (tmp_path / "run").exists()


def test_a_rank_that_cannot_start_ends_the_others(torchrun, config, tmp_path):
    """Its python ends before our first line."""
    script = tmp_path / "start.sh"
    script.write_text(f'#!/bin/sh\n[ "$RANK" = 1 ] && exit 3\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    process, log = torchrun(script, "train.py", config, f"run.dir={tmp_path / 'run'}", options=["--no-python"])
    assert process.wait(60) != 0
    assert "exitcode  : 3" in log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_named(config, tmp_path, rank, monkeypatch):
    """Nobody else is started; without rank 0, which keeps the store, nobody can be asked."""
    environment = os.environ | fork_server.place(rank, 2, fork_server.free_port())
    code = (
        "import runpy, sys; from thinker.runtime import process_group; process_group.CONNECT_SECONDS = 2; "
        "del sys.argv[0]; runpy.run_path('train.py', None, '__main__')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "train.py", config, f"run.dir={tmp_path / 'run'}", "train.dist_timeout_s=2"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 1
    said = {0: "error: rank 1 of 2 did not start within 2 s", 1: "error: rank 1 of 2 found nobody at 127.0.0.1:"}
    assert found.stderr.splitlines()[-1].startswith(said[rank])
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("what", "codes", "said"),
    [
        ("raise", [1, 1, 1], [None, "ZeroDivisionError: boom on rank 1", None]),
        ("network", [1, 1, 1], [None, "TimeoutError: the hub timed out", None]),
        ("mistake", [1, 2, 1], [None, "error: rank 1 cannot read its data", None]),
        ("mistake of all", [2, 2, 2], ["error: nobody can read the data", None, None]),
        ("die", [1, -9, 1], [r"rank 1 \(process \d+ on \S+\) of 4 has gone"]),
        ("silence", [1, -9, 1], [r"rank 1 \(process \d+ on \S+\) of 4 gave no answer for 4 s"]),
        ("hang", [1, -9, 1], [r"rank 1 \(process \d+ on \S+\) of 4 gave no answer for 4 s \(train.dist_timeout_s\)"]),
    ],
)
def test_how_one_rank_of_four_fails_is_said_once(tmp_path, what, codes, said):
    start = time.monotonic()
    ended = fork_server.outcomes(
        4, rank_workers.fail, what, folder=tmp_path, timeout=40, hanging=[1] * (what in ("hang", "silence"))
    )
    assert time.monotonic() - start < 30
    assert [code for code, _ in ended] == [*codes, codes[-1]]
    texts = [text for _, text in ended]
    if len(said) == 3:
        for text, wanted in zip(texts, [*said, None]):
            assert (wanted in text) if wanted else text == ""
    else:  # whoever misses it first says so, in one line
        lines = [line for text in texts for line in text.splitlines()]
        assert len(lines) == 1, texts
        assert re.match(f"error: {said[0]}.*; the same command resumes", lines[0])
