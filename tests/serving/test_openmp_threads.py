"""The server gives back the threads of OpenMP that have loaded a model."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, time
import torch
from thinker.serving.openmp_threads import release_openmp_threads

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
x = torch.rand(2_000_000)
known = x.sum()
before = threads()
release_openmp_threads()
while threads() > before - 2:  # they end by themselves
    time.sleep(0.01)
assert x.sum() == known
assert threads() >= before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_helpers_end_and_come_back():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
