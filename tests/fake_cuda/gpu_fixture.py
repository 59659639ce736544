"""The fixture of these tests, as a plugin of pytest: a second conftest.py would hide that of the
other tests."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def gpu():
    """The fake device, with every new tensor fake."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield torch.device("cuda:0")
