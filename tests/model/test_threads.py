"""Several threads that use one model compute what one thread does."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import random_model

LENGTHS = [5, 40, 17, 64, 33, 3, 50, 22]
SCALING = {"type": "dynamic", "factor": 2.0, "original_max_seq_len": 16}


@pytest.fixture
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "options", [{}, {"rope_scaling": SCALING}, {"attention": "window(4)"}], ids=str
)
def test_threads_share_a_model(frequent_switches, one_thread, options):
    tokens = torch.randint(61, (1, 64), generator=torch.Generator().manual_seed(1))
    expected = [random_model(1, **options)(tokens[:, :n]) for n in LENGTHS]

    @torch.no_grad()
    def run(model, index):
        return model(tokens[:, : LENGTHS[index]])

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            model = random_model(1, **options)  # anew: what is shared is made in its first passes
            order = [*range(len(LENGTHS))] * 3
            for index, logits in zip(order, pool.map(run, [model] * len(order), order)):
                torch.testing.assert_close(logits, expected[index], rtol=0, atol=1e-5)
