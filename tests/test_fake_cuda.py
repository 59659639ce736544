"""What can be proved about a GPU without one: tests/fake_cuda, in processes where torch believes in one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "fake_cuda"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(sys.platform != "linux", reason="the fake device is built for Linux")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_on_fake_cuda(path):
    command = [sys.executable, FOLDER / "run.py", "-q", "--color=no", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
