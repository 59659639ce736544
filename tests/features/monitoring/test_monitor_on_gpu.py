"""A continuous batch on a GPU that is watched gives the texts of generate()."""

import random

import pytest
import torch
from batch_cases import KINDS, check_on_gpu

from thinker.features.monitoring.monitor import Monitor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_gpu_equal_those_of_generate(kind):
    check_on_gpu(kind, random.Random(f"{kind} True"), monitor=Monitor())
