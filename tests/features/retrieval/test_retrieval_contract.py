"""A cache with retrieval keeps the contract of all caches (tests/cache_contract.py)."""

import pytest
import torch
from cache_contract import CHECKS, CacheCase

from thinker.features.retrieval.retrieval_cache import RetrievalCache

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = [
    CacheCase(
        "nothing evicted",
        lambda model, rows, _: RetrievalCache(model, rows, 16, 2, 2, 4, torch.float32),
    ),
    # All blocks are retrieved, so that each query attends to the whole text.
    CacheCase(
        "blocks evicted",
        lambda model, rows, _: RetrievalCache(model, rows, 4, 0, 8, 2, torch.float32),
        can_truncate=False,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_cache_with_retrieval_keeps_the_contract(case, check):
    check(case)
