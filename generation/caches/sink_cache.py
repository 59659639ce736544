"""KV cache of bounded size for texts of any length: attention sinks and a sliding window."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.generation.caches.full_cache import FullCaches
from thinker.generation.sequence import Completion
from thinker.generation.setup import Setup
from thinker.model import Thinker
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.kv_cache import KVCache, RingLayer
from thinker.model.masks import CacheSlots, ForwardContext
from thinker.model.patterns.pattern import INVALID_POSITION, Pattern, TokenInfo
from thinker.model.patterns.position_patterns import global_positions
from thinker.model.patterns.position_patterns import window as sliding_window
from thinker.model.positions import apply_rotary_emb
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError


@dataclass
class SinkSlots(CacheSlots):
    """Adds the positions from which queries attend to the sinks."""

    # Of the sinks for a single query, or of several queries for the sinks.
    rotation: tuple[Tensor, Tensor] | None = None
    is_sink: Tensor | None = None  # (S,), in a pass over several positions
    has_new_sinks: Tensor | None = None  # (B, 1, 1, 1), rows with unwritten sinks; None: no row


@dataclass
class SinkLayer(RingLayer):
    """A ring buffer whose global positions are sinks; `keys` holds them rotated for the current
    token."""

    sinks: Tensor  # (B, K, n_global, D), the keys of the sinks with RoPE at their own positions
    tensors = ("keys", "values", "sinks")
    no_truncate_reason = "a sink cache cannot restore evicted positions; create a new cache"

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, slots: SinkSlots
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As RingLayer.update, but several queries get twice the width, to attend to sinks from
        nearer."""
        n = self.n_global
        if k.shape[2] > 1 and slots.kv_len is not None:
            self.keys[:, :, :n] = self.sinks
        q, keys, values = super().update(q, k, v, slots)
        if slots.has_new_sinks is not None:
            self.sinks.copy_(torch.where(slots.has_new_sinks, self.keys[:, :, :n], self.sinks))
        if slots.rotation is not None and q.shape[2] == 1:
            # The returned `keys` are a view of these.
            self.keys[:, :, :n] = apply_rotary_emb(self.sinks, slots.rotation)
        elif slots.rotation is not None:
            # To attend to the sinks from another position, the query is rotated once more. With
            # both versions side by side, each half meets its own kind of keys.
            is_sink = slots.is_sink[:, None]  # (S, 1)
            q = torch.cat((q, apply_rotary_emb(q, slots.rotation)), dim=-1)  # (B, H, T, 2D)
            keys = torch.cat((keys * ~is_sink, keys * is_sink), dim=-1)
        return q, keys, values


class SinkCache(KVCache):
    """Keeps the first `sinks` positions and the newest `window`, and evicts the others.

    Without sinks this is sliding-window attention. With sinks (Xiao et al. 2023, arXiv:2309.17453),
    a query attends to them from position sinks + window − 1 at most, so that no distance exceeds
    the size of the cache.
    """

    def __init__(self, model: Thinker, batch_size: int, window: int, sinks: int = 0) -> None:
        self.sinks = sinks
        self.rope = model.rope
        self.pattern = sliding_window(window) | global_positions(sinks)
        super().__init__(model.config, batch_size, sinks + window, model.device, model.dtype)

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> SinkLayer:
        keys, values = self._new_tensors(B, K, self.max_len + 1)
        return SinkLayer(keys, values, self.slack, self.sinks, keys[:, :, : self.sinks].clone())

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """As KVCache.append, but new positions always fit.

        Rows of unequal length append one position at a time.
        """
        is_even = min(self.lengths) == max(self.lengths)
        if length > 1 and not is_even:
            problem = "rows of a sink cache have unequal lengths"
            raise UserError(f"{problem}; append 1 position at a time, not {length}")
        starts = self.reserve(batch_size, length)
        end = max(self.lengths)
        begins = to_device(starts, self.device)  # (B,)
        positions = torch.arange(length, device=self.device)
        if is_even:
            positions = positions + starts[0]  # (T,)
        else:
            positions = begins[:, None] + positions  # (B, T)
        ring = self.layers[0]
        mask = AttentionMask()
        slots = SinkSlots(ring.slot_mapping(positions), min(end, self.max_len))
        if min(starts) < self.sinks:
            slots.has_new_sinks = (begins < self.sinks)[:, None, None, None]
        if self.sinks > 0 and end > self.max_len:
            slots.rotation = self._sink_rotation(positions, end)
        if length == 1:
            if not is_even:
                is_filled = ring.slot_positions(begins + 1, slots.kv_len) != INVALID_POSITION
                mask.allowed = is_filled[:, None, None]  # (B, 1, 1, S)
        elif starts[0] == 0 and end <= self.max_len:
            mask.is_causal = True
            slots.kv_len = None
        else:
            slots.kv_len = min(starts[0], self.max_len)
            in_ring = ring.slot_positions(begins[:1], slots.kv_len)[0]
            keys = torch.cat((in_ring, positions))  # (S,)
            queries = TokenInfo(positions[:, None])
            mask.allowed = self.pattern(None, queries, TokenInfo(keys))  # (T, S)
            slots.is_sink = keys < self.sinks
        n_layers = len(self.layers)
        return ForwardContext(positions, end, [mask] * n_layers, [slots] * n_layers)

    def _sink_rotation(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """How queries beyond position sinks + window − 1 attend to the sinks: from there."""
        nearer = (positions - self.max_len + 1).clamp_min(0)  # (T,) or (B, T)
        tables = self.rope(nearer, end, self.dtype)
        cos, sin = self.rope.without_scaling(tables)
        if positions.shape[-1] > 1:  # queries rotate in the other direction
            sin = -sin
        return cos, sin


class WindowCaches(FullCaches):
    """Makes SinkCaches (see CacheFactory)."""

    option = "window"
    can_roll_back = False
    is_unbounded = True

    def __init__(self, setup: Setup, window: int, sinks: int) -> None:
        """Raises UserError if the window does not suit the model or the other options."""
        if sinks < 0:
            raise UserError(f"sinks is {sinks}; use at least 0, and only with a window")
        max_seq_len = setup.config.max_seq_len
        if not 1 <= window <= max_seq_len - sinks:
            limit = f"the trained context ({max_seq_len} tokens)"
            raise UserError(
                f"window is {window}, sinks is {sinks}; "
                f"use window >= 1, and a sum of at most {limit}"
            )
        setup.need_cache("window")
        if setup.cache_bits is not None:
            raise UserError("cache_bits cannot be combined with a window, whose cache is small")
        setup.need_plain_attention("window")
        self.window = window
        self.sinks = sinks

    def new(self, model: Thinker, batch_size: int, max_len: int, slack: int = 0) -> KVCache:
        """As CacheFactory.new(). A text may be longer than `max_len`."""
        return SinkCache(model, batch_size, self.window, self.sinks)

    def bytes_per_text(self, model: Thinker, max_len: int) -> int:
        """As FullCaches.bytes_per_text(), of the window alone."""
        return super().bytes_per_text(model, min(max_len, self.window + self.sinks))

    def n_evicted(self, n_read: int) -> int:
        """As CacheFactory.n_evicted()."""
        return max(0, n_read - self.sinks - self.window)

    def describe_evicted(self, completions: list[Completion]) -> str:
        """As CacheFactory.describe_evicted()."""
        most = max(completion.n_evicted for completion in completions)
        if most == 0:
            return ""
        first = self.sinks + 1
        last = self.sinks + most
        n_positions = last + self.window + 1
        kept = f"the window keeps the first {self.sinks} and the newest {self.window}"
        return f"evicted tokens {first} to {last} of {n_positions}; {kept}"
