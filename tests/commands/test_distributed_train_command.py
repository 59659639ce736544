"""Trainings of several processes that are killed, stopped, hang, or do not start."""

import os
import re
import signal
import sys
from pathlib import Path

import fork_server
import pytest
import rank_workers
import torch
from conftest import ROOT, start_script
from safetensors.torch import load_file
from training_runs import (
    checkpoint_steps,
    last_step,
    metrics_without_times,
    temporary_files,
    wait_for,
)

from thinker import checkpoint

CONFIG = """
model: {d_model: 32, n_layers: 1, n_heads: 2, n_kv_heads: 1}
data: {source: tales, max_documents: 60, seq_len: 32, tokenizer: byte}
train: {max_steps: 100000, decay_fraction: 0, batch_size: 4, eval_every: 6, eval_sequences: 2, save_every: 4,
  keep_last: 1000, save_sharded: true, precision: fp32, compile: false, device: cpu, dist_timeout_s: 600}
"""  # which any signal ends: without a falling rate a step does not depend on the last one
TORCHRUN = "from torch.distributed.run import main\n\nmain()\n"
IMPATIENT = """
import runpy
from thinker.training.distributed import process_group

process_group.CONNECT_SECONDS, process_group.ROLL_CALL_SECONDS = %s
runpy.run_path(%r, None, "__main__")
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "config.yaml"
    path.write_text(CONFIG.replace("data: {", f"data: {{cache_dir: {path.parent / 'cache'}, "))
    return path


@pytest.fixture
def torchrun(tmp_path):
    """Starts a training of two ranks under the real torchrun; a rank that outlives the test is a
    failure."""
    commands, script = [], tmp_path / "torchrun.py"
    script.write_text(TORCHRUN)

    def start(*arguments):
        commands.append(start_script(script, "--nproc-per-node", "2", *arguments))
        return commands[-1]

    yield start
    for command in commands:
        left = [] if command.poll() is not None else rank_pids(command)
        command.kill()
        command.wait()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == [], command.output()


def rank_pids(torchrun):
    """The process ids of torchrun's ranks, rank 0 first."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
    try:
        pids = [int(pid) for pid in children.read_text().split()]
        ranks = {
            pid: re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
            for pid in pids
        }
    except OSError:
        return []
    return sorted((pid for pid in pids if ranks[pid]), key=lambda pid: int(ranks[pid][1]))


@pytest.fixture
def start_ranks():
    """Starts the two ranks of a training without torchrun, which spares its processes the import of
    torch."""
    commands = []

    def start(*arguments, script=ROOT / "train.py"):
        port = fork_server.free_port()
        environments = [
            os.environ | fork_server.rank_environment(rank, 2, port) for rank in range(2)
        ]
        ranks = [start_script(script, *arguments, environment=each) for each in environments]
        commands.extend(ranks)
        return ranks

    yield start
    for command in commands:
        command.kill()
        command.wait()


def has_ended(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def resumed_at(log):
    """The checkpoint from which a training has resumed, if it has."""
    return [int(step) for step in re.findall(r"resuming from step (\d+)", log)]


def assert_saved_once_by_both(run, log):
    step = last_step(run)
    assert checkpoint_steps(run)[-1] == step
    assert log.count(f"saved step {step} in {run}") == 1
    folder = run / "checkpoints" / f"step-{step:08d}"
    checkpoint.verify(folder)
    assert len(list(folder.glob("shard-*"))) == 2  # each rank has written its part
    assert temporary_files(run) == []


def assert_as_if_uninterrupted(run, resumed, start_ranks, config, options, tmp_path):
    """The run is, to the last bit of the last checkpoint that both have, as one of two ranks that
    nobody kills.

    A signal to rank 0 ends that one.
    """
    calm, end = tmp_path / "calm", last_step(run)
    ranks = start_ranks(config, f"run.dir={calm}", *options)
    assert wait_for(lambda: last_step(calm) > end, ranks[0]), ranks[0].output()
    ranks[0].send_signal(signal.SIGTERM)
    assert [each.wait() for each in ranks] == [143, 143]
    assert_saved_once_by_both(calm, "".join(each.output()[1] for each in ranks))
    step = max({*checkpoint_steps(run)} & {*checkpoint_steps(calm)})
    assert step > resumed
    ours, theirs = (
        {
            path.name: load_file(path)
            for path in (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
        }
        for folder in (run, calm)
    )
    assert ours.keys() == theirs.keys()
    for file in theirs:
        assert ours[file].keys() == theirs[file].keys()
        assert all(torch.equal(ours[file][name], tensor) for name, tensor in theirs[file].items())
    ours, theirs = (
        [line for line in metrics_without_times(each) if line["step"] <= end]
        for each in (run, calm)
    )
    assert ours == theirs[: len(ours)]
    assert all(
        "val_loss" in line and line["step"] == end for line in theirs[len(ours) :]
    )  # the signal came before it


def test_torchrun_restarts_after_a_rank_was_killed_and_hands_a_signal_on(
    torchrun, start_ranks, config, tmp_path
):
    run, options = tmp_path / "run", ["train.parallel=ddp"]
    process = torchrun("--max-restarts", "1", "train.py", config, f"run.dir={run}", *options)
    assert wait_for(lambda: last_step(run) >= 6, process), process.output()
    killed = rank_pids(process)
    os.kill(killed[0], signal.SIGKILL)
    assert wait_for(lambda: resumed_at(process.output()[1]), process), process.output()
    assert has_ended(killed)
    (resumed,) = resumed_at(process.output()[1])
    assert resumed >= 4
    assert wait_for(lambda: last_step(run) >= resumed + 8, process), process.output()
    pids = rank_pids(process)
    process.terminate()
    assert process.wait() != 0
    assert has_ended(pids)
    assert_saved_once_by_both(run, process.output()[1])
    assert_as_if_uninterrupted(run, resumed, start_ranks, config, options, tmp_path)


def test_a_killed_rank_ends_the_others_and_costs_only_time(start_ranks, config, tmp_path):
    """And a signal to rank 1 saves on both ranks at the same step."""
    run, options, script = tmp_path / "run", ["train.parallel=fsdp"], tmp_path / "impatient.py"
    script.write_text(
        IMPATIENT % ((60.0, 0.1), str(ROOT / "train.py"))
    )  # nobody is left whom rank 0 could wait for
    ranks = start_ranks(config, f"run.dir={run}", *options, script=script)
    assert wait_for(lambda: last_step(run) >= 6, ranks[0]), ranks[0].output()
    ranks[1].kill()
    assert ranks[0].wait() == 1
    assert re.search(r"rank 1 \(process \d+ on \S+\) of 2 ended unexpectedly", ranks[0].output()[1])
    kept = checkpoint_steps(run)[-1]
    ranks = start_ranks(config, f"run.dir={run}", *options)
    assert wait_for(
        lambda: last_step(run) >= kept + 6 and resumed_at(ranks[0].output()[1]), ranks[0]
    )
    ranks[1].send_signal(signal.SIGTERM)
    assert [each.wait() for each in ranks] == [143, 143]
    assert resumed_at(ranks[0].output()[1]) == [kept]
    assert_saved_once_by_both(run, "".join(each.output()[1] for each in ranks))
    assert_as_if_uninterrupted(run, kept, start_ranks, config, options, tmp_path)


def test_a_mistake_is_shown_once_and_ends_all(start_ranks, config, tmp_path):
    ranks = start_ranks(
        config, f"run.dir={tmp_path / 'run'}", "train.batch_size=7", "train.max_steps=9"
    )
    assert [rank.wait() for rank in ranks] == [2, 2]
    lines = [line for rank in ranks for line in rank.output()[1].splitlines()]
    assert [line for line in lines if line.startswith("error:")] == [
        "error: train.batch_size (7) is not a multiple of the number of ranks (2); "
        "change it, or use one of these numbers of ranks: 1, 7"
    ]
    assert not (tmp_path / "run").exists()


def test_torchrun_repeats_our_line_at_the_end_of_its_own(torchrun, config, tmp_path):
    process = torchrun("train.py", config, f"run.dir={tmp_path / 'run'}", "train.batch_size=7")
    assert process.wait() != 0
    lines = process.output()[1].splitlines()
    ours = [
        line
        for line in lines
        if "error: train.batch_size (7) is not a multiple of the number of ranks" in line
    ]
    assert len(ours) == 2, lines
    assert ours[0].startswith("error: ")
    assert lines.index(ours[1]) >= len(lines) - 2  # a line of === ends torchrun's report
    assert "Root Cause" in "".join(lines[-9:])


def test_a_rank_that_cannot_start_ends_the_others(torchrun, config, tmp_path):
    """Its python ends before our first line."""
    script = tmp_path / "start.sh"
    script.write_text(f'#!/bin/sh\n[ "$RANK" = 1 ] && exit 3\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    process = torchrun("--no-python", script, "train.py", config, f"run.dir={tmp_path / 'run'}")
    assert process.wait() != 0
    assert "exitcode  : 3" in process.output()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_starts_is_named(config, tmp_path, rank):
    """Nobody else is started; without rank 0, which keeps the store, nobody can be asked."""
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT % ((1.0, 0.1), str(ROOT / "train.py")))
    environment = os.environ | fork_server.rank_environment(rank, 2, fork_server.free_port())
    arguments = [script, config, f"run.dir={tmp_path / 'run'}", "train.dist_timeout_s=0.5"]
    command = start_script(*arguments, environment=environment)
    _, stderr = command.communicate()
    assert command.returncode == 1
    message = {
        0: "error: rank 1 of 2 did not start within 0.5 s",
        1: "error: rank 1 of 2 could not connect to rank 0 at 127.0.0.1:",
    }
    assert stderr.splitlines()[-1].startswith(message[rank])
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("failure", "statuses", "messages"),
    [
        ("exception", [1, 1, 1], [None, "ZeroDivisionError: boom on rank 1", None]),
        ("network", [1, 1, 1], [None, "error: the hub timed out", None]),
        ("user error", [1, 2, 1], [None, "error: rank 1 cannot read its data", None]),
        ("user error on all ranks", [2, 2, 2], ["error: nobody can read the data", None, None]),
    ],
)
def test_an_error_on_one_rank_of_four_is_shown_once(tmp_path, failure, statuses, messages):
    exits = fork_server.run_ranks_to_exit(4, rank_workers.fail_on_rank_1, failure, folder=tmp_path)
    assert [status for status, _ in exits] == [*statuses, statuses[-1]]
    for (_, text), message in zip(exits, [*messages, None]):
        assert (message in text) if message else text == ""


REAL_CLOCK = pytest.mark.stress  # every wait lasts, and any rank may be the first to miss rank 1


@pytest.mark.parametrize(
    ("failure", "message", "seconds"),
    [
        ("killed", "ended unexpectedly", None),
        ("hangs before an object", "did not respond for 0.5 s", None),
        ("hangs before a tensor", "did not respond for 0.5 s (train.dist_timeout_s)", None),
        pytest.param("hangs before an object", "did not respond for 10 s", 10.0, marks=REAL_CLOCK),
        pytest.param("hangs before a tensor", "did not respond for 10 s", 10.0, marks=REAL_CLOCK),
    ],
)
def test_a_rank_of_four_that_is_lost_is_named_once(tmp_path, failure, message, seconds):
    hanging = [1] if failure.startswith("hangs") else []
    exits = fork_server.run_ranks_to_exit(
        4, rank_workers.fail_on_rank_1, failure, seconds, folder=tmp_path, hanging=hanging
    )
    assert [status for status, _ in exits] == [1, -signal.SIGKILL, 1, 1]
    lines = [line for _, text in exits for line in text.splitlines()]
    assert len(lines) == 1, lines
    rank_3 = r"(, 3 \(process \d+ on \S+\))?" if seconds else ""  # it may still wait for the others
    error = rf"error: rank 1 \(process \d+ on \S+\){rank_3} of 4 {re.escape(message)}.*; run the same command again"
    assert re.match(error, lines[0])
