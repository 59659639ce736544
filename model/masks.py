"""What one pass through a model sees, in every layer: made by the host from plain integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.model.attend import AttentionMask, look
from thinker.model.patterns import Linear, Pattern, TokenInfo
from thinker.model.positions import slopes


@dataclass
class ForwardContext:
    """Where one forward pass stands: its positions, and what each layer sees from there. The host knows all of it."""

    positions: Tensor  # (T,), or (B, T) where rows differ
    end: int  # one past the last position
    sights: list[AttentionMask]  # of each layer; layers that see alike share one
    query: TokenInfo | None = None  # of a pass whose keys are its own, the queries' places


class MaskBuilder:
    """What every look() of a model has in common: `patterns` by layer; with `alibi`, its slopes."""

    def __init__(
        self,
        patterns: list[Pattern | Linear],
        n_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        kernel: str = "auto",
        *,
        alibi: bool = False,
        plain_scores: bool = True,
    ) -> None:
        self.patterns, self.n_heads, self.dtype, self.kernel = patterns, n_heads, dtype, kernel
        self.made_for, self.plain_scores = (dtype, device, kernel), plain_scores
        self.slopes = slopes(n_heads, device) if alibi else None
        self.by_token = any(pattern.by_token for pattern in patterns)
        self.known: tuple[int, dict[Pattern | Linear, AttentionMask]] = 0, {}

    def __call__(self, pattern: Pattern, query: TokenInfo, key: TokenInfo, aligned: bool = False) -> AttentionMask:
        """See attention.attend.look."""
        return look(pattern, query, key, self.n_heads, self.dtype, self.slopes, aligned, self.kernel, self.plain_scores)

    def whole(self, query: TokenInfo) -> ForwardContext:
        """A whole sequence at once, without a cache. What depends on its length alone is kept for the next one."""
        T, sights = query.position.shape[-1], {}
        if query.document is None and query.token is None:
            if self.known[0] != T:
                self.known = T, {}
            sights = self.known[1]
        for pattern in self.patterns:
            if pattern not in sights:
                linear = isinstance(pattern, Linear)
                sights[pattern] = (
                    AttentionMask(prepared=query.document) if linear else self(pattern, query, query, True)
                )
        return ForwardContext(query.position, T, [sights[pattern] for pattern in self.patterns], query)

    def of(self, layer: int, query: TokenInfo, rows: slice) -> AttentionMask:
        """What some of the queries of a whole sequence see, for the reference; nothing is made for the others."""
        some = TokenInfo(**{name: x if x is None else x[..., rows] for name, x in vars(query).items()})
        return look(self.patterns[layer], some, query, self.n_heads, self.dtype, self.slopes, kernel="reference")
