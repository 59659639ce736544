"""What a Generator needs to know of its caches: how to make one, and what it can do."""

from __future__ import annotations

import copy
from typing import Protocol

from thinker.generation.sequence import Completion
from thinker.model import KVCache, Thinker, ThinkerConfig


class CacheFactory(Protocol):
    """Makes the caches of a Generator.

    Attributes:
        option: the option of Generator() that asks for these caches, for messages.
        bits: of keys and values; None: the dtype of the model.
        can_roll_back: whether the newest positions can be removed, such as rejected drafts.
        is_unbounded: whether a text may have any length, whatever the model.
        is_observable: whether attention to a copy of a cache can be measured.
    """

    option: str
    bits: int | None
    can_roll_back: bool
    is_unbounded: bool
    is_observable: bool

    def new(self, model: Thinker, batch_size: int, max_len: int, slack: int = 0) -> KVCache:
        """An empty cache. `slack`: newest positions that can always be removed.

        Raises UserError if it exceeds the memory.
        """

    def check_memory(self, model: Thinker, n_texts: int, max_len: int) -> None:
        """Raise UserError if the caches of so many texts exceed the memory."""

    def n_evicted(self, n_read: int) -> int:
        """Number of positions that have left the window of a text with `n_read` positions."""

    def stored_bytes(self, config: ThinkerConfig, n_read: int) -> int:
        """Memory of the positions that have left the window, if they are kept elsewhere."""

    def describe_evicted(self, completions: list[Completion]) -> str:
        """A line about what has left the window in these texts; "" if nothing has."""


def copy_row(cache: KVCache, index: int) -> KVCache:
    """A cache with a copy of one row."""
    clone = copy.copy(cache)
    clone.layers = [copy.copy(layer) for layer in cache.layers]
    clone.select([index])
    return clone
