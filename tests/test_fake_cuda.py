"""What can be proved about a GPU without one: tests/fake_cuda, in processes where torch believes in
one."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "fake_cuda"
FILES = sorted(FOLDER.glob("test_*.py"))
N_PROCESSES = 2  # each takes seconds to start


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux",
    reason="the fake device is built by g++ on Linux",
)


def run(*command):
    done = subprocess.run(
        [sys.executable, *command, "-q", "--color=no"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.skipif(torch.version.cuda is not None, reason="for torch's CPU build")
@pytest.mark.parametrize(
    "paths",
    [FILES[start::N_PROCESSES] for start in range(N_PROCESSES)],
    ids=lambda paths: "-".join(path.stem.removeprefix("test_") for path in paths),
)
def test_on_fake_cuda(paths):
    run(FOLDER / "run.py", *paths)


@needs_compiler
@pytest.mark.stress
@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build, but no GPU")
def test_everything_compiles_for_sm90():
    run(FOLDER.parent / "sm90" / "run.py")


@needs_compiler
@pytest.mark.skipif(torch.version.cuda is not None, reason="one of those above")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, but no GPU")
@pytest.mark.parametrize(
    "cards",
    [
        pytest.param("sm_90-bf16-overlap", id="h100"),
        pytest.param("not sm_90-bf16-overlap", id="others", marks=pytest.mark.stress),
    ],
)
def test_decode_kernels_compile(cards):
    folder = FOLDER.parent / "sm90"
    run(folder / "run.py", folder / "test_fused_kernels.py", "-k", cards)
