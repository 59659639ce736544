"""The contract of all caches of generation/, and of the model's own (tests/cache_contract.py)."""

import pytest
from cache_contract import CHECKS, CacheCase

from thinker.generation.caches.quantized_cache import make_cache
from thinker.generation.caches.sink_cache import SinkCache

pytestmark = pytest.mark.usefixtures("one_thread")


def full(model, rows, max_len):
    return model.new_cache(rows, max_len)


def ring(model, rows, max_len):
    return model.new_cache(rows, max_len, slack=4)


CASES = [
    CacheCase("full", full),
    CacheCase("ring", ring, attention="window(5)"),
    CacheCase("ring with global positions", ring, attention="window(5) | global(2)"),
    CacheCase("linear", full, attention="linear(8)", tolerance=2e-3, can_truncate=False),
    CacheCase("8 bits", lambda *shape: make_cache(*shape, bits=8), tolerance=0.3),
    CacheCase("4 bits", lambda *shape: make_cache(*shape, bits=4), tolerance=2.0),
    CacheCase("window", lambda model, rows, _: SinkCache(model, rows, 20)),
    CacheCase("window with sinks", lambda model, rows, _: SinkCache(model, rows, 20, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_cache_keeps_the_contract(case, check):
    check(case)
