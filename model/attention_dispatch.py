"""One entry point for every attention variant: kernel selection, dispatch, and a readable
reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinker.model.kernels.decode_attention import decode_attention
from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo
from thinker.runtime.device import TRITON_CAPABILITY, has_capability
from thinker.runtime.errors import UserError

FLASH_CAPABILITY = (8, 0)  # of the kernel for variable lengths
ROWS = 64  # queries per chunk of the reference, to bound memory
KERNELS = ("auto", "sdpa", "blockwise", "local", "flex", "varlen", "reference")


class PreparedKernel(Protocol):
    """A kernel that is prepared for one mask."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        attn_logit_softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As attend() with this mask."""


@dataclass
class AttentionMask:
    """Which keys the queries of one pass attend to, in the form that `kernel` reads. The default
    hides no keys."""

    # Broadcastable to (B, H, T, S): bool, or a bias that is added to the scores.
    allowed: Tensor | None = None
    # Instead of `allowed`, if queries and keys are the same positions.
    is_causal: bool = False
    # The kernel that the mask was built for, one of KERNELS, or "cache": a KV cache whose `compute`
    # also attends to keys that attend() is not given.
    kernel: str = "auto"
    # Some queries may have no visible key.
    may_be_empty: bool = False
    # (q, k, scores of q, rows: those of q) -> allowed.
    content_mask: Callable[..., Tensor] | None = None
    # The kernel itself, unless it is SDPA or the reference; prepared once per pass for all layers.
    compute: PreparedKernel | None = None
    # (B, T), for linear attention, which reads nothing else.
    document_ids: Tensor | None = None
    # Builds plain rows if the kernel reads another form.
    reference_rows: Callable[[slice], AttentionMask] | None = None

    @property
    def differs_by_head(self) -> bool:
        """Whether `allowed` has a head dimension."""
        return self.allowed is not None and self.allowed.dim() == 4 and self.allowed.shape[1] > 1

    def slice_rows(self, rows: slice, q: Tensor, k: Tensor) -> AttentionMask:
        """The mask of a slice of queries, for the reference."""
        allowed = self.allowed
        if self.is_causal:
            keys = torch.arange(k.shape[2], device=k.device)  # (S,)
            queries = torch.arange(q.shape[2], device=k.device)[rows]
            allowed = keys <= queries[:, None]  # (rows, S)
        elif allowed is not None and allowed.shape[-2] > 1:
            allowed = allowed[..., rows, :]
        content_mask = self.content_mask
        if content_mask is not None:
            content_mask = partial(content_mask, rows=rows)
        return AttentionMask(
            allowed, kernel=self.kernel, may_be_empty=self.may_be_empty, content_mask=content_mask
        )


def choose_kernel(
    requested: str,
    pattern: Pattern,
    query: TokenInfo,
    aligned: bool,
    dtype: torch.dtype,
    has_bias: bool,
    plain_scores: bool,
    has_learned_bias: bool = False,
) -> str:
    """Select the fastest kernel that supports a pattern with these inputs, or check the requested
    kernel.

    has_bias: a bias by distance; has_learned_bias: one that needs a gradient. See MaskBuilder for
    the other arguments. Raises UserError if the requested kernel does not
    support the pattern.
    """
    has_documents = query.document_id is not None
    has_limit = aligned and pattern.max_distance is not None
    is_bounded = has_limit and not (pattern.n_global and has_documents)
    is_window = pattern == CAUSAL or pattern.text == f"window({pattern.max_distance})"
    by_query = aligned and plain_scores and not (pattern.by_content or pattern.bidirectional_prefix)
    supported = {
        "reference": True,
        "sdpa": plain_scores and not pattern.by_score,
        "blockwise": by_query and pattern.includes_self,
        "local": is_bounded and not pattern.by_content,
        "flex": aligned and not pattern.by_content,
        "varlen": aligned and plain_scores and is_window and has_documents and not has_bias,
    }
    if has_learned_bias:  # no other kernel has its gradient
        supported = {name: supported[name] for name in ("reference", "sdpa")}
    if requested != "auto":
        if supported.get(requested, False):
            return requested
        hint = f"choose from: {', '.join(KERNELS)}"
        if requested in KERNELS:
            hint = "use auto"
        raise UserError(
            f"the kernel {requested!r} does not support {pattern.text} with these inputs; {hint}"
        )
    T = query.position.shape[-1]
    if query.position.is_cuda:
        is_plain = pattern == CAUSAL and plain_scores and not (has_documents or has_bias)
        if T >= 1024 and not is_plain:
            device = query.position.device
            is_half = dtype in (torch.bfloat16, torch.float16)
            if supported.get("varlen") and is_half and has_capability(device, FLASH_CAPABILITY):
                return "varlen"
            if supported.get("flex") and has_capability(device, TRITON_CAPABILITY):
                return "flex"
    elif supported.get("blockwise") and dtype == torch.bfloat16 and T <= 1024:
        return "blockwise"
    elif supported.get("local") and 2 * (pattern.max_distance + pattern.n_global) + 128 < T:
        return "local"
    return "sdpa" if supported["sdpa"] else "reference"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    attn_logit_softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale · q kᵀ) v over the visible keys; the result is 0 for queries without
    visible keys.

    Args:
        q: (B, H, T, D), the same shape as the result.
        k, v: (B, K, S, D). K divides H; each KV head serves H/K query heads.
        scale: factor on the scores (default: 1/√D).
        attn_logit_softcap: limits scores smoothly: s becomes cap · tanh(s / cap) (Gemma 2,
            arXiv:2408.00118).
        sinks: (H,), one extra score per head without a value, which lets a head attend to nothing.
    """
    if mask is None:
        mask = AttentionMask()
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if mask.compute is not None:
        return mask.compute(q, k, v, scale, attn_logit_softcap, sinks)
    if attn_logit_softcap is not None or sinks is not None or mask.kernel == "reference":
        return _reference(q, k, v, mask, scale, attn_logit_softcap, sinks)
    if mask.content_mask is not None:
        allowed = mask.content_mask(q, k)  # (B, H, T, S)
        if mask.allowed is not None:
            allowed = mask.allowed.masked_fill(~allowed, -torch.inf)
        mask = AttentionMask(allowed, may_be_empty=mask.may_be_empty)
    if mask.differs_by_head and not torch.is_grad_enabled():
        # SDPA expands a per-head mask to one number per score; chunks of queries bound that memory.
        n_rows = 8 * ROWS
        parts = []
        for start in range(0, q.shape[2], n_rows):
            rows = slice(start, start + n_rows)
            parts.append(_sdpa(q[:, :, rows], k, v, mask.slice_rows(rows, q, k), scale))
        return torch.cat(parts, dim=2)
    return _sdpa(q, k, v, mask, scale)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
    attn_logit_softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The sum of the values by attention_weights()."""
    v = repeat_heads(v, q.shape[1])  # (B, H, S, D)
    mask_of = partial(mask.slice_rows, q=q, k=k)
    chunks = chunked_attention_weights(q, k, mask_of, scale, attn_logit_softcap, sinks)
    parts = [weights.to(v.dtype) @ v for _, weights in chunks]  # (B, H, rows, D) each
    return torch.cat(parts, dim=2)


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Repeat each KV head for the query heads that it serves: (B, K, S, D) -> (B, H, S, D)."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    attn_logit_softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention weights of the reference (Vaswani et al. 2017), (B, H, T, S), in fp32 or
    float64."""
    return softmax_with_sinks(attention_scores(q, k, mask, scale, attn_logit_softcap), sinks)


def attention_scores(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    attn_logit_softcap: float | None = None,
) -> Tensor:
    """What attention_weights() takes the softmax of, (B, H, T, S); -inf where a key is hidden."""
    if mask is None:
        mask = AttentionMask()
    if scale is None:
        scale = q.shape[-1] ** -0.5
    dtype = torch.promote_types(q.dtype, torch.float32)
    k = repeat_heads(k, q.shape[1]).to(dtype)  # (B, H, S, D)
    scores = q.to(dtype) @ k.transpose(-2, -1) * scale  # (B, H, T, S)
    if attn_logit_softcap is not None:
        scores = attn_logit_softcap * torch.tanh(scores / attn_logit_softcap)
    allowed = mask.allowed
    if mask.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    elif allowed is not None and allowed.dtype != torch.bool:
        scores = scores + allowed  # a bias
        allowed = None
    if mask.content_mask is not None:
        allowed = mask.content_mask(q, k, scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The attention weights of these scores (B, H, T, S). A query without visible keys has weights
    0."""
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)  # (B, H, T, 1)
    # Also filled before the softmax, so that the gradient is not NaN.
    return scores.masked_fill(is_empty, 0).softmax(dim=-1).masked_fill(is_empty, 0)


def chunked_attention_weights(
    q: Tensor, k: Tensor, mask_of: Callable[[slice], AttentionMask], *options: Any
) -> Iterator[tuple[slice, Tensor]]:
    """Yield attention_weights() of ROWS queries at a time, or of all if gradients flow;
    mask_of(rows) masks them."""
    T = q.shape[2]
    n_rows = ROWS
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        n_rows = T
    for start in range(0, T, n_rows):
        rows = slice(start, min(start + n_rows, T))
        yield rows, attention_weights(q[:, :, rows], k, mask_of(rows), *options)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """attend() by torch's scaled_dot_product_attention, or for a few queries on a CPU by ours."""
    is_grouped = q.shape[1] != k.shape[1]
    allowed = mask.allowed
    if q.device.type == "cpu":
        needs_sdpa = mask.is_causal or mask.may_be_empty or torch.is_grad_enabled()
        if not needs_sdpa and q.shape[2] <= 16 and q.dtype == torch.float32:
            return decode_attention(q, k, v, allowed, scale)
        k = k.contiguous()  # as SDPA's flash kernel requires
    elif q.is_cuda and is_grouped:
        if q.shape[2] == 1 and not (mask.differs_by_head or mask.is_causal):
            # With one query per head, heads that share a KV head become its queries, so that each
            # key is read once.
            B, H, _, D = q.shape
            q = q.reshape(B, k.shape[1], -1, D)  # (B, K, H/K, D)
            return _sdpa(q, k, v, mask, scale).reshape(B, H, 1, -1)
        if allowed is not None:
            # CUDA's kernels with a mask do not support grouped keys: SDPA would fall back to the
            # slow math path.
            k = repeat_heads(k, q.shape[1])  # (B, H, S, D)
            v = repeat_heads(v, q.shape[1])
            is_grouped = False
    if allowed is not None and allowed.dtype != torch.bool:
        if mask.may_be_empty and q.dtype != allowed.dtype:
            # If only distant keys are visible, their biases are large, and 16 bits cannot tell them
            # apart.
            allowed = allowed - allowed.amax(-1, keepdim=True).nan_to_num(neginf=0)
        allowed = allowed.to(q.dtype)
    options = {"attn_mask": allowed, "is_causal": mask.is_causal, "scale": scale}
    if is_grouped:  # not enable_gqa=is_grouped: while compiling, is_grouped may be a symbol
        options["enable_gqa"] = True
    if q.is_cuda and not (mask.is_causal and torch.is_grad_enabled()):
        # cuDNN's gradients with a mask may be NaN, and it builds a new plan for every cache length.
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q, k, v, **options)
