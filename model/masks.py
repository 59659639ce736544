"""Building the attention masks of a pass, per layer, from the positions of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from thinker.model.attention_dispatch import AttentionMask, choose_kernel
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.flex_attention import FlexAttention
from thinker.model.kernels.local_attention import LocalBlocks, positions_to_blocks
from thinker.model.kernels.varlen_attention import VarlenAttention
from thinker.model.patterns import CAUSAL, INVALID_POSITION, LinearAttentionSpec, Pattern, TokenInfo
from thinker.model.positions import alibi_slopes


@dataclass
class CacheSlots:
    """Where a layer's cache stores the new keys of a pass, and how much of it the queries read."""

    slot_mapping: Tensor  # (T,) or (B, T)
    kv_len: int | None = None  # slots to be read; None: the new keys are all there are


@dataclass
class ForwardContext:
    """The positions of one forward pass and the mask of each layer. The host knows all of it."""

    positions: Tensor  # (T,), or (B, T) where rows differ
    end: int  # one past the last position
    masks: list[AttentionMask]  # per layer; layers with the same pattern share one
    slots: list[CacheSlots | None]  # per layer; None without a cache of keys


class MaskBuilder:
    """Builds the masks of one model, from its patterns per layer and what all of its masks have in common."""

    def __init__(self, config: ThinkerConfig, dtype: torch.dtype, device: torch.device, kernel: str = "auto") -> None:
        self.patterns, self.n_heads = config.patterns, config.n_heads
        self.dtype, self.device, self.kernel = dtype, device, kernel
        self.plain_scores = config.attn_logit_softcap is None and not config.attention_sinks
        self.alibi_slopes = alibi_slopes(self.n_heads, device) if config.positions == "alibi" else None
        self.by_token = any(pattern.by_token for pattern in self.patterns)
        self._length = 0  # that the masks below were built for
        self._masks: dict[Pattern | LinearAttentionSpec, AttentionMask] = {}

    def build(self, pattern: Pattern, query: TokenInfo, key: TokenInfo, aligned: bool = False) -> AttentionMask:
        """build_mask() with what all masks of the model have in common."""
        common = self.n_heads, self.dtype, self.alibi_slopes
        mask = build_mask(pattern, query, key, *common, aligned, self.kernel, self.plain_scores)
        if aligned:
            mask.reference_rows = partial(self.reference_mask, pattern, query)
        return mask

    def whole_sequence(self, query: TokenInfo) -> ForwardContext:
        """The context of a pass without a cache. Masks that depend on the length alone are kept for the next pass."""
        T, masks = query.position.shape[-1], {}
        if query.document_id is None and query.token_id is None:
            if self._length != T:
                self._length, self._masks = T, {}
            masks = self._masks
        for pattern in self.patterns:
            if pattern in masks:
                continue
            if isinstance(pattern, LinearAttentionSpec):
                masks[pattern] = AttentionMask(kernel_state=query.document_id)
            else:
                masks[pattern] = self.build(pattern, query, query, aligned=True)
        return ForwardContext(
            query.position, T, [masks[pattern] for pattern in self.patterns], [None] * len(self.patterns)
        )

    def reference_mask(self, pattern: Pattern, query: TokenInfo, rows: slice = slice(None)) -> AttentionMask:
        """The mask of some queries of a whole sequence, for the reference; nothing is built for the others."""
        part = _map_tensors(query, lambda x: x[..., rows])
        return build_mask(pattern, part, query, self.n_heads, self.dtype, self.alibi_slopes, kernel="reference")


def build_mask(
    pattern: Pattern,
    query: TokenInfo,
    key: TokenInfo,
    n_heads: int,
    dtype: torch.dtype = torch.float32,
    alibi_slopes: Tensor | None = None,
    aligned: bool = False,
    kernel: str = "auto",
    plain_scores: bool = True,
) -> AttentionMask:
    """Choose the kernel for a pattern and build the mask in the form that it reads.

    Args:
        query, key: positions (T,) or (B, T), and (S,) or (B, S), with document and token ids where the pass has them.
        n_heads: H, query heads.
        dtype: of the activations.
        alibi_slopes: (H,), what a score loses per position of distance (ALiBi, Press et al. 2022, arXiv:2108.12409).
        aligned: queries and keys are the same positions, in the same order.
        kernel: one of attention_dispatch.KERNELS to force it; "reference" computes everything.
        plain_scores: attend() gets neither attn_logit_softcap nor sinks.

    Raises UserError if the kernel does not compute the pattern.
    """
    has_alibi = alibi_slopes is not None
    kernel = choose_kernel(kernel, pattern, query, dtype, aligned, plain_scores, has_alibi)
    if kernel == "flex":
        return AttentionMask(kernel=kernel, kernel_state=FlexAttention(pattern, query, n_heads, alibi_slopes))
    if kernel == "varlen":
        return AttentionMask(kernel=kernel, kernel_state=VarlenAttention(query.document_id, pattern.max_distance))
    if pattern == CAUSAL and aligned and query.document_id is None and not has_alibi:
        return AttentionMask(is_causal=True, kernel=kernel)
    mask = AttentionMask(kernel=kernel, may_be_empty=not pattern.includes_self)
    if kernel == "local":
        mask.local_blocks = LocalBlocks.for_distance(pattern.max_distance, pattern.n_global)
        info, blocks = query, mask.local_blocks
        query, key = (  # (blocks or B·blocks, block) and (..., n_global + before + block)
            _map_tensors(info, lambda x, i=i: positions_to_blocks(x, blocks, INVALID_POSITION)[i].flatten(0, -2))
            for i in (0, 1)
        )
    device = query.position.device
    if pattern.by_head or has_alibi:
        head = torch.arange(n_heads, device=device)[:, None, None]  # (H, 1, 1)
    else:
        head = torch.zeros((), dtype=int, device=device)
    query, key = _unsqueeze(query, -1), _unsqueeze(key, -2)  # (..., T, 1) and (..., 1, S)
    bias = None
    if has_alibi:
        bias = -alibi_slopes[:, None, None] * (query.position - key.position).abs()  # (H, T, S) or (B, H, T, S)
    if pattern.by_score:

        def score_mask(scores: Tensor, rows: slice) -> Tensor:
            part = _map_tensors(query, lambda x: x[..., rows, :])  # (..., rows, 1)
            part.scores = scores
            return pattern(head, part, key)

        mask.allowed, mask.score_mask = bias, score_mask
        return mask
    mask.allowed = pattern(head, query, key)  # (T, S), (H, T, S) or (B, 1 or H, T, S)
    if bias is None and kernel == "blockwise":
        bias = torch.zeros((), dtype=dtype)
    if bias is not None:
        mask.allowed = bias.masked_fill(~mask.allowed, -torch.inf)
    if mask.allowed.dim() == 3:
        mask.allowed = mask.allowed[None]
    return mask


def _map_tensors(info: TokenInfo, function) -> TokenInfo:  # noqa: ANN001
    """The same tokens with a function applied to each of their tensors."""
    tensors = (getattr(info, field.name) for field in fields(info))
    return TokenInfo(*(None if x is None else function(x) for x in tensors))


def _unsqueeze(info: TokenInfo, dim: int) -> TokenInfo:
    """(T,) -> (T, 1) or (1, T); (B, T) -> (B, 1, T, 1) or (B, 1, 1, T), so that heads broadcast."""
    return _map_tensors(info, lambda x: (x if x.dim() == 1 else x[:, None]).unsqueeze(dim))
