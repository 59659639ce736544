"""A disk that is really full: what was saved stays, byte for byte, and the run goes on when there
is space."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run_script
from training_runs import assert_same_run

INSIDE = """
import os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import fork_server
import thinker.training.run
from thinker import checkpoint


def train():
    # In a process of its own, which has imported torch already.
    stderr, pid = mount.parent / "stderr", os.fork()
    if pid == 0:
        fork_server._run_script(command, os.getcwd(), dict(os.environ), os.devnull, os.devnull, stderr, ())
    _, status = os.waitpid(pid, 0)
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(status), stderr=stderr.read_text())


mount, size, reference, command = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", mount], check=True)
full = train()
said = full.stderr.splitlines()
assert full.returncode == 1, full.stderr
assert said[-1].startswith("error: the disk is full"), full.stderr
assert sum(line.startswith("error: ") for line in said) == 1 and "Traceback" not in full.stderr, full.stderr
folder = mount / "run" / "checkpoints"
kept = sorted(path.name for path in folder.iterdir())
assert all(name.startswith(("step-", "best-")) for name in kept), kept  # no temporary_files
for name in kept:
    checkpoint.verify(folder / name)
    for file in ("model.safetensors", "training.safetensors"):
        if (folder / name / file).exists() and (reference / name).exists():
            assert (folder / name / file).read_bytes() == (reference / name / file).read_bytes(), (name, file)
again = train()
assert again.returncode == 1 and "Traceback" not in again.stderr, again.stderr  # it is still full
for name in kept:
    checkpoint.verify(folder / name)
subprocess.run(["mount", "-o", "remount,size=64m", mount], check=True)
done = train()
assert done.returncode == 0, done.stderr
last = max(name for name in [*kept, "step-0"] if name.startswith("step-"))
assert last == "step-0" or f"resuming from step {int(last[5:])} " in done.stderr, done.stderr
subprocess.run(["cp", "-r", mount / "run", mount.parent / "copy"], check=True)
print(len(kept))
"""


def test_the_old_checkpoints_stay_and_the_run_goes_on(train_args, tmp_path, stress):
    """At several sizes, so that the end comes in different files; with saves in the background
    too."""
    alone = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    private = [*alone, "unshare", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*private, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs a mount namespace")
    options = ["train.keep_last=100", "train.max_steps=20", "train.eval_every=7"]
    whole = tmp_path / "whole"
    assert run_script(*train_args, f"run.dir={whole}", *options).returncode == 0
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = []
    for size in range(900, 4500, 300) if stress else (2600,):
        for background in ("false", "true")[: 2 if stress else 1]:
            place = tmp_path / f"{size}-{background}"
            (place / "small").mkdir(parents=True)
            command = [
                *train_args,
                f"run.dir={place / 'small' / 'run'}",
                *options,
                f"train.async_save={background}",
            ]
            done = subprocess.run(
                [*private, sys.executable, "-c", INSIDE, place / "small", str(size), whole / "checkpoints",
                 *command],
                capture_output=True, text=True, cwd=ROOT, timeout=600, env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            made.append(int(done.stdout))
            if background == "false":
                assert_same_run(whole, place / "copy", 20)
            shutil.rmtree(place)
    assert not stress or min(made) < max(made)  # the end did come at different places
    print(f"checkpoints there when the disk was full: {made}")
