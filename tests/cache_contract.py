"""What every cache promises. Tests of each room and feature run these checks on their caches."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import random_model

from thinker.generation.caches.cache_factory import copy_row
from thinker.model import KVCache, Thinker
from thinker.runtime.errors import UserError

LENGTH = 12  # tokens of the texts; no cache evicts any of them


@dataclass(frozen=True)
class CacheCase:
    """A kind of cache. `tolerance`: of logits, compared with a pass without a cache."""

    name: str
    new: Callable[[Thinker, int, int], KVCache]  # model, rows, positions
    tolerance: float = 1e-4
    attention: str = "full"
    can_truncate: bool = True

    def model(self) -> Thinker:
        return random_model(
            vocab_size=61, head_dim=16, max_seq_len=64, attention=self.attention, norm_mean=0.3
        )

    def cache(self, model: Thinker, rows: int) -> KVCache:
        return self.new(model, rows, 64)

    def assert_close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=self.tolerance)


def texts(rows: int) -> torch.Tensor:
    return torch.randint(61, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def read(model: Thinker, tokens: torch.Tensor, cache: KVCache, *lengths: int) -> torch.Tensor:
    """Read tokens in passes of these lengths."""
    return torch.cat([model(part, cache=cache) for part in tokens.split(lengths, dim=1)], dim=1)


def fed(model, cache, tokens, chunks):
    """The logits of all tokens, fed by chunks of these sizes in turn, over and over."""
    pieces, at = [], 0
    while at < tokens.shape[1]:
        size = chunks[len(pieces) % len(chunks)]
        pieces.append(model(tokens[:, at : at + size], cache=cache))
        at += size
    return torch.cat(pieces, dim=1)


def appending_equals_the_full_pass(case: CacheCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)
    for lengths in ((12,), (5, 7), (1,) * 12, (3, 1, 1, 7)):
        cache = case.cache(model, 2)
        case.assert_close(read(model, tokens, cache, *lengths), expected)
        assert cache.lengths == [LENGTH, LENGTH]
        assert cache.nbytes > 0


def truncating_forgets(case: CacheCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)
    cache = case.cache(model, 2)
    read(model, tokens, cache, LENGTH)
    if not case.can_truncate:
        assert not cache.can_truncate([8, 8])
        with pytest.raises(UserError, match="cannot truncate"):
            cache.truncate([8, 8])
        assert cache.lengths == [LENGTH, LENGTH]
        return
    assert cache.can_truncate([8, 8])
    other = torch.zeros_like(tokens[:, :4])
    cache.truncate([8, 8])
    read(model, other, cache, 4)  # a draft that is rejected
    cache.truncate([8, 8])
    case.assert_close(read(model, tokens[:, 8:], cache, 1, 3), expected[:, 8:])
    with pytest.raises(UserError, match="cannot truncate"):
        cache.truncate([LENGTH + 1, LENGTH])


def selected_rows_go_on(case: CacheCase) -> None:
    model, tokens = case.model(), texts(3)
    with torch.no_grad():
        expected = model(tokens)
    cache = case.cache(model, 3)
    read(model, tokens[:, :8], cache, 8)
    rows = [2, 0, 0]
    cache.select(rows)
    found = read(model, tokens[rows, 8:], cache, 1, 1, 1, 1)
    case.assert_close(found, expected[rows, 8:])


def joined_rows_go_on(case: CacheCase) -> None:
    """Rows of unequal lengths, which then grow by one position at a time."""
    model, tokens = case.model(), texts(3)
    with torch.no_grad():
        expected = model(tokens)
    cache, other = case.cache(model, 1), case.cache(model, 2)
    read(model, tokens[:1, :5], cache, 5)
    read(model, tokens[1:, :9], other, 9)
    cache.concat_rows(other)
    assert cache.lengths == [5, 9, 9]
    for step in range(3):
        newest = torch.stack([tokens[0, 5 + step], tokens[1, 9 + step], tokens[2, 9 + step]])
        found = read(model, newest[:, None], cache, 1)[:, 0]
        case.assert_close(found[0], expected[0, 5 + step])
        case.assert_close(found[1:], expected[1:, 9 + step])


def a_copied_row_is_independent(case: CacheCase) -> None:
    model, tokens = case.model(), texts(2)
    with torch.no_grad():
        expected = model(tokens)
    cache = case.cache(model, 2)
    read(model, tokens[:, :8], cache, 8)
    copy = copy_row(cache, 1)
    read(model, torch.zeros_like(tokens[:1, 8:]), copy, 4)
    case.assert_close(read(model, tokens[:, 8:], cache, 1, 1, 1, 1), expected[:, 8:])


CHECKS = [
    appending_equals_the_full_pass,
    truncating_forgets,
    selected_rows_go_on,
    joined_rows_go_on,
    a_copied_row_is_independent,
]
