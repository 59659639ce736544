"""Attention patterns: predicates over absolute positions. docs/explanations/attention.md shows each
as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf
from operator import or_

import torch
from torch import Tensor

from thinker.runtime.errors import UserError

INVALID_POSITION = (
    1 << 40
)  # the position of a cache slot that holds no key yet: later than every query


@dataclass
class TokenInfo:
    """Queries or keys of a pass. Their tensors broadcast: queries (..., T, 1) against keys (..., 1,
    S)."""

    position: Tensor
    document_id: Tensor | None = (
        None  # with document masking; positions then restart in each document
    )
    token_id: Tensor | None = None  # for patterns that select tokens by id
    scores: Tensor | None = (
        None  # (B, H, T, S) of the queries, for patterns that select keys by score
    )
    vectors: Tensor | None = (
        None  # queries (B, H, T, D), keys (B, K, S, D), for patterns that select keys by content
    )


MaskMod = Callable[[Tensor, TokenInfo, TokenInfo], Tensor]


@dataclass(frozen=True)
class Pattern:
    """Which keys each query attends to: mask_mod(head, query, key) -> bool. `|` and `&` combine two
    patterns.

    The other fields select kernels and caches. Beyond `max_distance` only the first `n_global` keys
    are visible.
    """

    text: str
    mask_mod: MaskMod = field(compare=False, repr=False)
    max_distance: int | None = (
        None  # number of newest keys that can be visible, including the query's own; None: all
    )
    n_global: int = 0
    bidirectional_prefix: int = 0  # first positions, which attend to each other in both directions
    includes_self: bool = True  # every query attends at least to itself
    by_head: bool = False
    tokens: tuple[int, ...] = ()  # selected token ids
    by_score: bool = False  # needs the scores of all keys
    # depends on queries and keys, not only on positions (model/patterns/content_patterns.py)
    by_content: bool = False
    min_heads: int = 1  # with fewer heads, part of the pattern would be unused
    n_features: int = (
        0  # of linear attention (model/attention.py), which needs no mask; 0: any other pattern
    )

    def __call__(self, head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        """True if the query attends to the key. With document masking both are in the same
        document."""
        visible = self.mask_mod(head, query, key)
        return (
            visible
            if query.document_id is None
            else visible & (query.document_id == key.document_id)
        )

    @property
    def fits_ring_buffer(self) -> bool:
        """Whether decoding needs only the first keys and a ring buffer of the newest."""
        return self.max_distance is not None and not (self.tokens or self.by_content)

    def __or__(self, other: Pattern) -> Pattern:
        text = f"({self.text} | {other.text})"
        return _combine(
            text,
            lambda *args: self.mask_mod(*args) | other.mask_mod(*args),
            [self, other],
            max,
            any,
        )

    def __and__(self, other: Pattern) -> Pattern:
        text = f"({self.text} & {other.text})"
        return _combine(
            text,
            lambda *args: self.mask_mod(*args) & other.mask_mod(*args),
            [self, other],
            min,
            all,
        )


def _combine(
    text: str, mask_mod: MaskMod, patterns: Sequence[Pattern], limit: Callable, include: Callable
) -> Pattern:
    """Combine patterns: `limit` (max or min) their distance and prefix, `include` (any or all)
    their includes_self."""
    if any(pattern.n_features for pattern in patterns):
        raise UserError("linear cannot be combined with other patterns; use it for whole layers")
    distance = limit(
        inf if pattern.max_distance is None else pattern.max_distance for pattern in patterns
    )
    return Pattern(
        text,
        mask_mod,
        max_distance=None if distance == inf else distance,
        n_global=max(pattern.n_global for pattern in patterns),
        bidirectional_prefix=limit(pattern.bidirectional_prefix for pattern in patterns),
        includes_self=include(pattern.includes_self for pattern in patterns),
        by_head=any(pattern.by_head for pattern in patterns),
        tokens=sum((pattern.tokens for pattern in patterns), ()),
        by_score=any(pattern.by_score for pattern in patterns),
        by_content=any(pattern.by_content for pattern in patterns),
        min_heads=max(pattern.min_heads for pattern in patterns),
    )


def full() -> Pattern:
    """All earlier positions and its own (Vaswani et al. 2017, arXiv:1706.03762)."""
    return Pattern("full", lambda head, q, k: k.position <= q.position)


CAUSAL = full()


def window(w: int) -> Pattern:
    """The newest w keys, including its own (Beltagy et al. 2020, arXiv:2004.05150)."""
    return Pattern(
        f"window({w})",
        lambda head, q, k: (k.position <= q.position) & (q.position - k.position < w),
        max_distance=w,
    )


def dilated(w: int, d: int) -> Pattern:
    """Every d-th of the newest w keys (Beltagy et al. 2020)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        distance = query.position - key.position
        return (distance >= 0) & (distance < w) & (distance % d == 0)

    return Pattern(f"dilated({w}, {d})", mask_mod, max_distance=w)


def global_positions(g: int) -> Pattern:
    """`global(g)`: the first g positions (Beltagy et al. 2020; as attention sinks in Xiao et al.
    2023)."""
    return Pattern(
        f"global({g})",
        lambda head, query, key: (key.position < g) & (key.position <= query.position),
        max_distance=0,
        n_global=g,
        includes_self=False,
    )


def global_tokens(*ids: int) -> Pattern:
    """`token(id, ...)`: later queries attend to these tokens, which attend to all before them
    (Beltagy et al. 2020)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        is_global = sum((query.token_id == i) | (key.token_id == i) for i in ids) > 0
        return is_global & (key.position <= query.position)

    return Pattern(f"token({', '.join(map(str, ids))})", mask_mod, includes_self=False, tokens=ids)


def block(b: int, n: int = 1) -> Pattern:
    """Blocks of b positions: the query's own and the n - 1 before (Qiu et al. 2020,
    arXiv:1911.02972)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return (key.position <= query.position) & (query.position // b - key.position // b < n)

    return Pattern(f"block({b}, {n})", mask_mod, max_distance=n * b)


def strided(s: int) -> Pattern:
    """The newest s keys and every s-th key before them, with s about √T (Child et al. 2019,
    arXiv:1904.10509)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        distance = query.position - key.position
        return (distance >= 0) & ((distance < s) | (distance % s == 0))

    return Pattern(f"strided({s})", mask_mod)


def random(b: int, r: int, seed: int = 0) -> Pattern:
    """Blocks of b queries that attend to r random earlier blocks per head (Zaheer et al. 2020,
    arXiv:2007.14062)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        query_block, key_block = query.position // b, key.position // b
        visible = torch.zeros_like(query_block == key_block)
        for i in range(r):
            visible = visible | (
                key_block == _hash(seed, head, query_block, i) % query_block.clamp(min=1)
            )
        return visible & (key_block < query_block)

    return Pattern(f"random({b}, {r}, {seed})", mask_mod, includes_self=False, by_head=True)


def _hash(seed: int, head: Tensor, block: Tensor, i: int) -> Tensor:
    """Hash four numbers to an integer in [0, 2³¹) by SplitMix-like rounds, which need no table for
    long sequences."""
    x = (seed * 0x9E3779B1 + i * 0x85EBCA77) % (1 << 31) + head * 0xC2B2AE3 + block * 0x27D4EB2F
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = x & 0x7FFFFFFF
        x = ((x ^ (x >> 15)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)


def prefix(p: int) -> Pattern:
    """Bidirectional in the first p positions, causal after them (Liu et al. 2018,
    arXiv:1801.10198)."""
    return Pattern(
        f"prefix({p})",
        lambda head, query, key: (key.position <= query.position) | (key.position < p),
        n_global=p,
        bidirectional_prefix=p,
    )


def per_head(*patterns: Pattern) -> Pattern:
    """`heads(p, q, ...)`: one pattern per head, repeated if there are more heads."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        index = head % len(patterns)
        visible = [
            (index == i) & pattern.mask_mod(head, query, key) for i, pattern in enumerate(patterns)
        ]
        return reduce(or_, visible)

    text = f"heads({', '.join(pattern.text for pattern in patterns)})"
    return replace(
        _combine(text, mask_mod, patterns, max, all), by_head=True, min_heads=len(patterns)
    )


def longformer(w: int, d: int, g: int) -> Pattern:
    """A window of w, every d-th key of the newest w·d, and the first g positions (Beltagy et al.
    2020)."""
    return window(w) | dilated(w * d, d) | global_positions(g)


def bigbird(w: int, g: int, b: int, r: int, seed: int = 0) -> Pattern:
    """A window of w, the first g positions, and r random blocks of b (Zaheer et al. 2020)."""
    return window(w) | global_positions(g) | random(b, r, seed)


def linear(m: int) -> Pattern:
    """m random features in place of the softmax (Choromanski et al. 2021, arXiv:2009.14794)."""
    return Pattern(f"linear({m})", CAUSAL.mask_mod, max_distance=0, n_features=m)
