"""Needles in a text that is longer than the window, read through a cache."""

from functools import partial

import pytest
import torch

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.evaluation import needle
from thinker.features.retrieval.retrieval_cache import RetrievalCache
from thinker.features.retrieval.windowed_needle import cached_log_probs
from thinker.generation.caches.sink_cache import SinkCache

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def byte():
    return make_tokenizer("byte", [])


@torch.no_grad()
def test_through_a_cache_values_have_the_same_probability(random_model, byte):
    """With a window as long as the text, with and without blocks; values share beginnings or have
    none in common."""
    model = random_model(vocab_size=byte.vocab_size, max_seq_len=128)
    context = torch.randint(0, 200, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    values = [byte.encode(value) for value in (" a", " ab", " abc", " abd", " z", " zebra")]
    known = needle.log_probs(model, context, values)
    for new_cache in (
        lambda: SinkCache(model, 1, 90, 2),
        lambda: RetrievalCache(model, 1, 8, 2, 20, 4, torch.float32),
    ):
        found = cached_log_probs(new_cache, model, context, values)
        torch.testing.assert_close(found, known, rtol=0, atol=1e-4)


def test_needles_in_a_window(random_model, byte):
    model = random_model(vocab_size=byte.vocab_size, max_seq_len=64)
    scorer = partial(cached_log_probs, lambda: RetrievalCache(model, 1, 16, 2, 2, 8))
    result = needle.needle_test(model, byte, 200, 2, scorer=scorer)
    assert result["n_examples"] == 2
    assert 0 < result["chance"] < 0.1
