"""Attention masks of a pass, built per layer from the positions of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
from torch import Tensor

from thinker.model.attention_dispatch import AttentionMask, choose_kernel
from thinker.model.config import ThinkerConfig
from thinker.model.kernels import load_kernel
from thinker.model.patterns.pattern import CAUSAL, INVALID_POSITION, Pattern, TokenInfo
from thinker.model.positions import RelativeBias, Rotation, alibi_slopes


@dataclass
class CacheSlots:
    """Where a layer's cache stores the new keys of a pass, and how much of it the queries read."""

    slot_mapping: Tensor  # (T,) or (B, T)
    kv_len: int | None = None  # slots to read; None: there are only the new keys


@dataclass
class ForwardContext:
    """What all layers of one forward pass need to know."""

    positions: Tensor  # (T,), or (B, T) if rows differ
    end: int  # one past the last position, known to the host
    masks: list[AttentionMask]  # per layer; layers with the same pattern share one
    slots: list[CacheSlots | None]  # per layer; None without a cache of keys
    # Per layer; None: a layer without RoPE.
    ropes: list[Rotation] = field(default_factory=list)
    # Per layer (B, K, T, D), added to the values of its heads; empty: nothing is.
    token_values: list[Tensor | None] = field(default_factory=list)
    # (B, 1): the id that precedes each row in the cache, if the cache keeps ids.
    token_before: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.token_values:
            self.token_values = [None] * len(self.masks)


@dataclass
class MaskBuilder:
    """Builds the masks of one model, each in the form that its kernel reads."""

    n_heads: int  # H, query heads
    dtype: torch.dtype = torch.float32  # dtype of the activations
    # (H,), penalty per position of distance (model/positions.py).
    alibi_slopes: Tensor | None = None
    kernel: str = "auto"  # one of attention_dispatch.KERNELS; "reference" supports all patterns
    plain_scores: bool = True  # without attn_logit_softcap and sinks
    patterns: list[Pattern] = field(default_factory=list)  # one per layer
    relative_bias: RelativeBias | None = None  # of the model that runs the pass
    # Length and masks of the last pass, replaced together because several threads may use a model.
    _last: tuple[int, dict[Pattern, AttentionMask]] = (0, {})

    @classmethod
    def of_model(
        cls, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, kernel: str
    ) -> MaskBuilder:
        """Create the builder for a model."""
        slopes = None
        if config.positions == "alibi":
            slopes = alibi_slopes(config.n_heads, device)
        plain_scores = config.attn_logit_softcap is None and not config.attention_sinks
        return cls(config.n_heads, dtype, slopes, kernel, plain_scores, config.patterns)

    @property
    def has_bias(self) -> bool:
        """Whether scores get a bias by distance."""
        return self.alibi_slopes is not None or self.relative_bias is not None

    @property
    def by_token(self) -> bool:
        """Whether a pattern needs token ids."""
        return any(pattern.tokens for pattern in self.patterns)

    def whole_sequence(self, query: TokenInfo) -> ForwardContext:
        """Context of a pass without a cache. Masks that depend only on the length are kept for the
        next pass."""
        T = query.position.shape[-1]
        length, masks = self._last
        is_fixed = self.relative_bias is None  # what is learned changes, and needs its gradient
        has_ids = query.document_id is not None or query.token_id is not None
        depends_on_length_alone = is_fixed and not has_ids
        if length != T or not depends_on_length_alone:
            masks = {}
        if depends_on_length_alone:
            self._last = (T, masks)
        for pattern in self.patterns:
            if pattern.n_features:
                masks[pattern] = AttentionMask(document_ids=query.document_id)
            elif pattern not in masks:
                masks[pattern] = self.build(pattern, query, query, aligned=True)
        by_layer = [masks[pattern] for pattern in self.patterns]
        return ForwardContext(query.position, T, by_layer, [None] * len(by_layer))

    def reference_mask(
        self, pattern: Pattern, query: TokenInfo, rows: slice = slice(None)
    ) -> AttentionMask:
        """Mask of a slice of queries, for the reference; the mask of the whole sequence is never
        built."""
        part = _map_tensors(query, lambda x: x[..., rows])
        return replace(self, kernel="reference").build(pattern, part, query)

    def build(
        self, pattern: Pattern, query: TokenInfo, key: TokenInfo, aligned: bool = False
    ) -> AttentionMask:
        """Mask between queries at positions (T,) or (B, T) and keys at (S,) or (B, S).

        `aligned`: both have the same positions in the same order. Raises UserError if `kernel` does
        not support it.
        """
        kernel = choose_kernel(
            self.kernel,
            pattern,
            query,
            aligned,
            self.dtype,
            self.has_bias,
            self.plain_scores,
            has_learned_bias=self.relative_bias is not None,
        )
        mask = AttentionMask(kernel=kernel, may_be_empty=not pattern.includes_self)
        if aligned:
            mask.reference_rows = partial(self.reference_mask, pattern, query)
        if kernel == "flex":
            new_kernel = load_kernel("flex")
            mask.compute = new_kernel(pattern, query, self.n_heads, self.alibi_slopes)
            return mask
        if kernel == "varlen":
            new_kernel = load_kernel("varlen")
            mask.compute = new_kernel(query.document_id, pattern.max_distance)
            return mask
        if kernel == "local":
            local = load_kernel("local")(pattern.max_distance, pattern.n_global)
            # (blocks or B·blocks, block) and (..., n_global + before + block)
            query = _map_tensors(key, local.query_blocks)
            key = _map_tensors(key, partial(local.key_blocks, invalid=INVALID_POSITION))
            self._set_allowed(mask, pattern, _unsqueeze(query, -1), _unsqueeze(key, -2))
            local.mask = AttentionMask(mask.allowed, may_be_empty=mask.may_be_empty)
            mask.compute = local
            return mask
        if pattern == CAUSAL and aligned and query.document_id is None and not self.has_bias:
            mask.is_causal = True
        else:
            self._set_allowed(mask, pattern, _unsqueeze(query, -1), _unsqueeze(key, -2))
        if kernel == "blockwise":
            mask.compute = load_kernel("blockwise")(mask.allowed)
        return mask

    def _set_allowed(
        self, mask: AttentionMask, pattern: Pattern, query: TokenInfo, key: TokenInfo
    ) -> None:
        """Mask for kernels that read `allowed`: query (..., T, 1), key (..., 1, S)."""
        device = query.position.device
        slopes = self.alibi_slopes
        if pattern.by_head or self.has_bias:
            head = torch.arange(self.n_heads, device=device)[:, None, None]  # (H, 1, 1)
        else:
            head = torch.zeros((), dtype=int, device=device)
        bias = None
        if self.has_bias:
            distance = (query.position - key.position).abs()  # (T, S) or (B, 1, T, S)
        if self.relative_bias is not None:
            bias = self.relative_bias(distance)  # (H, T, S) or (B, H, T, S)
        if slopes is not None:
            bias = -slopes[:, None, None] * distance  # (H, T, S) or (B, H, T, S)
        if pattern.by_content:
            mask.allowed = bias
            mask.content_mask = _content_mask(pattern, head, query, key)
            return
        mask.allowed = pattern(head, query, key)  # (T, S), (H, T, S) or (B, 1 or H, T, S)
        if bias is None and mask.kernel == "blockwise":
            bias = torch.zeros((), dtype=self.dtype)
        if bias is not None:
            mask.allowed = bias.masked_fill(~mask.allowed, -torch.inf)
        if mask.allowed.dim() == 3:
            mask.allowed = mask.allowed[None]


def _content_mask(
    pattern: Pattern, head: Tensor, query: TokenInfo, key: TokenInfo
) -> Callable[..., Tensor]:
    """The mask of a pattern that depends on the queries and keys of a layer."""

    def content_mask(
        q: Tensor, k: Tensor, scores: Tensor | None = None, rows: slice = slice(None)
    ) -> Tensor:
        part = _map_tensors(query, lambda x: x[..., rows, :])  # (..., rows, 1)
        part.scores = scores
        part.vectors = q
        return pattern(head, part, replace(key, vectors=k))

    return content_mask


def _map_tensors(info: TokenInfo, function: Callable[[Tensor], Tensor]) -> TokenInfo:
    """Apply a function to every tensor that is there."""
    mapped = TokenInfo(function(info.position))
    for each in fields(info)[1:]:
        tensor = getattr(info, each.name)
        if tensor is not None:
            setattr(mapped, each.name, function(tensor))
    return mapped


def _unsqueeze(info: TokenInfo, dim: int) -> TokenInfo:
    """(T,) -> (T, 1) or (1, T); (B, T) -> (B, 1, T, 1) or (B, 1, 1, T), so that heads broadcast."""

    def unsqueeze(x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x[:, None]  # (B, 1, T)
        return x.unsqueeze(dim)

    return _map_tensors(info, unsqueeze)
