"""Prefetched batches equal those that the loader makes directly."""

import time

import pytest
import torch

from thinker.data.batches.dataset import Sample
from thinker.data.batches.prefetch import Prefetcher


class Numbers:
    """A loader whose batch says its step."""

    def __init__(self, seconds=0.0):
        self.seconds, self.asked, self.dataset, self.n_sources = seconds, [], self, 1

    def close(self, is_finished=False):
        pass

    def document_ids(self, inputs):
        return inputs + 1

    def samples(self, step):
        return [Sample(step), Sample(step)]

    def batch(self, step, rows=slice(None)):
        self.asked.append(step)
        time.sleep(self.seconds)
        if step == 9:
            raise OSError("gone")
        return torch.full((2, 3), step)[rows], torch.tensor([[step, step, -1], [-1, -1, step]])[
            rows
        ]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_batches_are_those_of_the_loader_in_any_order(num_workers):
    loader = Numbers()
    prefetcher = Prefetcher(loader, num_workers=num_workers)
    for step in [0, 1, 2, 7, 3, 3]:
        batch = prefetcher.batch(step)
        assert (batch.inputs == step).all()
        assert batch.targets.tolist() == [[step, step, -1], [-1, -1, step]]
        assert batch.n_targets == 3
        assert (batch.document_ids == step + 1).all()
    prefetcher.close()
    assert sorted(loader.asked)[:3] == [0, 1, 2]  # each once


def test_a_rank_gets_its_rows():
    prefetcher = Prefetcher(Numbers(), rows=slice(1, 2), num_workers=0)
    batch = prefetcher.batch(4)
    assert batch.targets.tolist() == [[-1, -1, 4]]
    assert batch.n_targets == 1
    prefetcher.close()


def test_the_next_batch_is_prepared_before_it_is_requested():
    loader = Numbers(seconds=0.02)
    prefetcher = Prefetcher(loader)
    prefetcher.batch(0)
    assert prefetcher.waited > 0
    prefetcher._pending[1].result()
    assert loader.asked == [0, 1]
    prefetcher.close()


def test_what_fails_in_the_thread_fails_where_it_is_asked_for():
    prefetcher = Prefetcher(Numbers())
    prefetcher.batch(8)
    with pytest.raises(OSError, match="gone"):
        prefetcher.batch(9)
    prefetcher.close()
