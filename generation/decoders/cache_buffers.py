"""Tensors of a cache that stay in place, as compiled steps and CUDA graphs need them."""

import weakref
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from thinker.model import KVCache, Thinker

CAPACITY_MULTIPLE = 128  # positions


def rounded_capacity(cache: KVCache) -> int:
    """Positions of the buffers that a cache moves into."""
    return -(-cache.max_len // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


class CacheBuffers:
    """The tensors of a cache that stay in place, where one cache at a time has its keys."""

    def __init__(self, model: Thinker, n_rows: int, capacity: int) -> None:
        self.shape = n_rows, capacity
        self.buffers = model.new_cache(n_rows, capacity)
        self._owner: Callable[[], KVCache | None] = lambda: None  # weak, to the adopted cache
        self._keys: list[Tensor | None] = [None] * len(self.buffers.layers)  # of its layers

    def adopt(self, cache: KVCache) -> None:
        """Move a cache into the buffers, layer by layer in case of an interruption.

        The cache that was there before gets tensors of its own.
        """
        if all(self._holds(cache)):
            return
        owner = self._owner()
        if owner is not None:
            for index, is_held in enumerate(self._holds(owner)):
                if is_held:
                    layer = owner.layers[index]
                    keys = layer.keys.clone()
                    values = layer.values.clone()
                    owner.layers[index] = replace(layer, keys=keys, values=values)
        self._owner = weakref.ref(cache)
        B = len(cache.lengths)
        length = max(cache.lengths)
        for index, (buffer, layer) in enumerate(zip(self.buffers.layers, cache.layers)):
            for stored, contents in ((buffer.keys, layer.keys), (buffer.values, layer.values)):
                # A nan of an earlier text would pass a mask, since 0 · nan is nan.
                stored[:B, :, length:].zero_()
                stored[:B, :, :length] = contents[:, :, :length]
            keys = buffer.keys[:B, :, : cache.max_len]
            values = buffer.values[:B, :, : cache.max_len]
            self._keys[index] = keys
            cache.layers[index] = replace(layer, keys=keys, values=values)

    def _holds(self, cache: KVCache) -> list[bool]:
        """Whether each layer of the cache is a view of the buffers; false after select()."""
        return [layer.keys is keys for layer, keys in zip(cache.layers, self._keys)]
