"""Attention patterns whose visible keys depend on positions, token ids and heads."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo, combine


def window(w: int) -> Pattern:
    """The newest w keys, including its own (Beltagy et al. 2020, arXiv:2004.05150)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return (key.position <= query.position) & (query.position - key.position < w)

    return Pattern(f"window({w})", mask_mod, max_distance=w)


def dilated(w: int, d: int) -> Pattern:
    """Every d-th of the newest w keys (Beltagy et al. 2020)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        distance = query.position - key.position
        return (distance >= 0) & (distance < w) & (distance % d == 0)

    return Pattern(f"dilated({w}, {d})", mask_mod, max_distance=w)


def global_positions(g: int) -> Pattern:
    """`global(g)`: the first g positions (Beltagy et al. 2020; as attention sinks in Xiao et al.
    2023)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return (key.position < g) & (key.position <= query.position)

    return Pattern(f"global({g})", mask_mod, max_distance=0, n_global=g, includes_self=False)


def global_tokens(*ids: int) -> Pattern:
    """`token(id, ...)`: later queries attend to these tokens, which attend to all before them
    (Beltagy et al. 2020)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        is_global = sum((query.token_id == i) | (key.token_id == i) for i in ids) > 0
        return is_global & (key.position <= query.position)

    text = ", ".join(str(i) for i in ids)
    return Pattern(f"token({text})", mask_mod, includes_self=False, tokens=ids)


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
        query_block = query.position // b
        key_block = key.position // b
        visible = torch.zeros_like(query_block == key_block)
        for i in range(r):
            chosen = _hash(seed, head, query_block, i) % query_block.clamp(min=1)
            visible = visible | (key_block == chosen)
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

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return (key.position <= query.position) | (key.position < p)

    return Pattern(f"prefix({p})", mask_mod, n_global=p, bidirectional_prefix=p)


def per_head(*patterns: Pattern) -> Pattern:
    """`heads(p, q, ...)`: one pattern per head, repeated if there are more heads."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        index = head % len(patterns)
        visible = []
        for i, pattern in enumerate(patterns):
            visible.append((index == i) & pattern.mask_mod(head, query, key))
        return reduce(or_, visible)

    texts = ", ".join(pattern.text for pattern in patterns)
    combined = combine(f"heads({texts})", mask_mod, patterns, max, all)
    return replace(combined, by_head=True, min_heads=len(patterns))


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
