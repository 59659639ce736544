"""What can be proved about a GPU without one: tests/fake_cuda, in processes where torch believes in one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "fake_cuda"
FILES = sorted(FOLDER.glob("test_*.py"))
N_PROCESSES = 2  # each takes seconds to start


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(sys.platform != "linux", reason="the fake device is built for Linux")
@pytest.mark.parametrize(
    "paths",
    [FILES[start::N_PROCESSES] for start in range(N_PROCESSES)],
    ids=lambda paths: "-".join(path.stem.removeprefix("test_") for path in paths),
)
def test_on_fake_cuda(paths):
    command = [sys.executable, FOLDER / "run.py", "-q", "--color=no", *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
