"""These tests need CUDA hooks from before torch was imported: run.py gives them, tests/test_fake_cuda.py calls it."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

collect_ignore_glob = [] if "fake_cuda" in sys.modules else ["test_*.py"]


@pytest.fixture
def gpu():
    """The fake device, with every new tensor fake."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield torch.device("cuda:0")
