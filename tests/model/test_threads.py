"""Several threads that use one model compute what one thread does."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import random_model

from thinker.model import ThinkerConfig
from thinker.model.patterns import pattern_parser
from thinker.model.patterns.pattern_parser import parse_pattern

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


class Garbage:
    """Freed by the collector only, which runs a few lines of Python: other threads run meanwhile."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(50):
            pass


@pytest.fixture
def frequent_collections():
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    yield
    gc.set_threshold(*threshold)


def test_threads_parse_patterns(frequent_switches, frequent_collections):
    """Python 3.11.0 to 3.11.7 fail if two threads build syntax trees at once (gh-106905)."""

    def parse(first):
        for number in range(first, first + 200):
            Garbage()
            pattern = parse_pattern(f"window({number}) | global(4)")  # each only once: none is kept
            assert pattern.n_global == 4

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(parse, range(1, 8 * 200, 200)))


def test_the_patterns_of_a_model_are_parsed_once(monkeypatch):
    config = ThinkerConfig(vocab_size=61, attention="window(9) | prefix(3)")
    monkeypatch.setattr(pattern_parser, "ast", None)  # a server asks for them at each request
    assert config.prefix == 3
    assert config.patterns[0].text == "(window(9) | prefix(3))"
