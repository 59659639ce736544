"""What an attention pattern is: a predicate over absolute positions. Plain causal attention is
one.

position_patterns.py and content_patterns.py have the others; docs/explanations/attention.md shows
each as a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from thinker.runtime.errors import UserError

# The position of a cache slot that holds no key yet: later than every query.
INVALID_POSITION = 1 << 40


@dataclass
class TokenInfo:
    """Queries or keys of a pass. Their tensors broadcast: queries (..., T, 1) against keys (..., 1,
    S)."""

    position: Tensor
    # With document masking; positions then restart in each document.
    document_id: Tensor | None = None
    # For patterns that select tokens by id.
    token_id: Tensor | None = None
    # (B, H, T, S) of the queries, for patterns that select keys by score.
    scores: Tensor | None = None
    # Queries (B, H, T, D), keys (B, K, S, D), for patterns that select keys by content.
    vectors: Tensor | None = None


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
    # Number of newest keys that can be visible, including the query's own; None: all.
    max_distance: int | None = None
    n_global: int = 0
    bidirectional_prefix: int = 0  # first positions, which attend to each other in both directions
    includes_self: bool = True  # every query attends at least to itself
    by_head: bool = False
    tokens: tuple[int, ...] = ()  # selected token ids
    by_score: bool = False  # needs the scores of all keys
    # Depends on queries and keys, not only on positions (model/patterns/content_patterns.py).
    by_content: bool = False
    min_heads: int = 1  # with fewer heads, part of the pattern would be unused
    # Of linear attention (model/attention.py), which needs no mask; 0: any other pattern.
    n_features: int = 0

    def __call__(self, head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        """True if the query attends to the key. With document masking both are in the same
        document."""
        visible = self.mask_mod(head, query, key)
        if query.document_id is None:
            return visible
        return visible & (query.document_id == key.document_id)

    @property
    def fits_ring_buffer(self) -> bool:
        """Whether decoding needs only the first keys and a ring buffer of the newest."""
        return self.max_distance is not None and not (self.tokens or self.by_content)

    def __or__(self, other: Pattern) -> Pattern:
        def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
            return self.mask_mod(head, query, key) | other.mask_mod(head, query, key)

        return combine(f"({self.text} | {other.text})", mask_mod, [self, other], max, any)

    def __and__(self, other: Pattern) -> Pattern:
        def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
            return self.mask_mod(head, query, key) & other.mask_mod(head, query, key)

        return combine(f"({self.text} & {other.text})", mask_mod, [self, other], min, all)


def combine(
    text: str, mask_mod: MaskMod, patterns: Sequence[Pattern], limit: Callable, include: Callable
) -> Pattern:
    """Combine patterns: `limit` (max or min) their distance and prefix, `include` (any or all)
    their includes_self."""
    distances = []
    tokens: tuple[int, ...] = ()
    for pattern in patterns:
        if pattern.n_features:
            raise UserError(
                "linear cannot be combined with other patterns; use it for whole layers"
            )
        if pattern.max_distance is None:
            distances.append(inf)
        else:
            distances.append(pattern.max_distance)
        tokens += pattern.tokens
    max_distance = limit(distances)
    if max_distance == inf:
        max_distance = None
    return Pattern(
        text,
        mask_mod,
        max_distance=max_distance,
        n_global=max(pattern.n_global for pattern in patterns),
        bidirectional_prefix=limit(pattern.bidirectional_prefix for pattern in patterns),
        includes_self=include(pattern.includes_self for pattern in patterns),
        by_head=any(pattern.by_head for pattern in patterns),
        tokens=tokens,
        by_score=any(pattern.by_score for pattern in patterns),
        by_content=any(pattern.by_content for pattern in patterns),
        min_heads=max(pattern.min_heads for pattern in patterns),
    )


def full() -> Pattern:
    """All earlier positions and its own (Vaswani et al. 2017, arXiv:1706.03762)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        return key.position <= query.position

    return Pattern("full", mask_mod)


CAUSAL = full()
