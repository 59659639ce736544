"""One call for all forms of attention: what is seen, the kernel that computes it, and the reference beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.kernels.blockwise_attention import attend_blockwise
from thinker.model.kernels.decode_attention import decode_attention
from thinker.model.kernels.flex_attention import Flex
from thinker.model.kernels.local_attention import fold_keys, fold_places, fold_queries, unfold
from thinker.model.kernels.varlen_attention import Varlen
from thinker.model.patterns import CAUSAL, INVALID_POSITION, Pattern, TokenInfo
from thinker.runtime.errors import UserError

ROWS = 64  # queries whose weights are held at a time, by the reference
BLOCK = 64  # queries at least that are folded together
KERNELS = ("auto", "sdpa", "blockwise", "fold", "flex", "varlen", "reference")


@dataclass
class AttentionMask:
    """What the queries of one pass see of the keys in one layer, ready for a kernel. Nothing given: all of them."""

    allowed: Tensor | None = None  # (T, S), or broadcastable to (B, H, T, S): bool, or numbers that scores are added
    is_causal: bool = False  # instead of `allowed`, for T == S at the same positions
    kernel: str = "auto"
    blind: bool = False  # a query may see nothing at all
    fold: tuple[int, int, int] | None = None  # queries of a block, keys before it, first keys of all
    choose: Callable[[Tensor, slice], Tensor] | None = None  # scores (B, H, rows, S) of these queries -> allowed
    prepared: Any = None  # what the kernels flex and varlen need
    slots: Tensor | None = None  # where in the cache the new keys go, (T,) or (B, T)
    held: int | None = None  # slots of the cache to be read; None: the new keys are all there are

    def of(self, rows: slice, q: Tensor, k: Tensor) -> AttentionMask:
        """What some of the queries see, for the reference."""
        allowed, choose = self.allowed, self.choose
        if self.is_causal:
            allowed = torch.arange(k.shape[2], device=k.device) <= torch.arange(q.shape[2], device=k.device)[rows, None]
        elif allowed is not None and allowed.shape[-2] > 1:
            allowed = allowed[..., rows, :]
        if choose is not None:
            return replace(self, allowed=allowed, choose=lambda scores, _: choose(scores, rows))
        return replace(self, is_causal=False, allowed=allowed)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: AttentionMask | None = None,
    scale: float | None = None,
    attn_logit_softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys that are in sight; without one over all, in both directions.

    Many queries go through SDPA, without a (T, S) matrix of scores in memory; few on a CPU, as in decoding, through
    kernels/few.py; training in bf16 on a CPU through kernels/blockwise.py; what has a bounded reach block by block.

    Args:
        q: (B, H, T, D).
        k, v: (B, K, S, D), where K divides H; each key head serves H/K query heads.
        scale: 1/√D unless given.
        attn_logit_softcap: scores s become cap · tanh(s / cap) (Gemma 2, arXiv:2408.00118): smooth, unlike clamping.
        sinks: (H,), a further score of each head for a key without a value, so that it may look nowhere.

    Returns: (B, H, T, D). A query that sees nothing gives 0.
    """
    sight = AttentionMask() if sight is None else sight
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    length = q.shape[2]
    if sight.kernel == "flex":
        return sight.prepared(q, k, v, scale, attn_logit_softcap, sinks)
    if sight.kernel == "varlen":
        return sight.prepared(q, k, v, scale)
    if sight.fold is not None:
        block, back, first = sight.fold
        q, k, v = fold_queries(q, block), fold_keys(k, block, back, first), fold_keys(v, block, back, first)
        repeats = len(q) // len(sight.allowed)
        allowed = sight.allowed.repeat(repeats, 1, 1, 1)  # (B·blocks, 1 or H, block, first + back + block)
        sight = replace(sight, allowed=allowed)
    by_head = sight.allowed is not None and sight.allowed.dim() == 4 and sight.allowed.shape[1] > 1
    if attn_logit_softcap is not None or sinks is not None or sight.choose is not None or sight.kernel == "reference":
        v, see = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), lambda rows: sight.of(rows, q, k)
        parts = by_rows(q, k, see, scale, attn_logit_softcap, sinks)
        y = torch.cat([weights.to(v.dtype) @ v for _, weights in parts], dim=2)
    elif sight.kernel == "blockwise":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
        y = attend_blockwise(q, k, v, scale, sight.allowed)
    elif by_head and not torch.is_grad_enabled():
        # SDPA writes a mask as numbers, one for each score where heads differ: of some queries at a time.
        rows = [slice(start, start + 8 * ROWS) for start in range(0, q.shape[2], 8 * ROWS)]
        y = torch.cat([_sdpa(q[:, :, some], k, v, sight.of(some, q, k), scale) for some in rows], dim=2)
    else:
        y = _sdpa(q, k, v, sight, scale)
    return y if sight.fold is None else unfold(y, length)


def attention_weights(
    q: Tensor,
    k: Tensor,
    sight: AttentionMask | None = None,
    scale: float | None = None,
    attn_logit_softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference: the matrix that attend() multiplies v with, its softmax in fp32 (float64 for float64).

    Vaswani et al. 2017 (arXiv:1706.03762), equation 1. Returns (B, H, T, S): rows sum to 1; with sinks, to less.
    """
    sight = AttentionMask() if sight is None else sight
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(wide)  # (B, H, S, D)
    scores = q.to(wide) @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, T, S)
    if attn_logit_softcap is not None:
        scores = attn_logit_softcap * torch.tanh(scores / attn_logit_softcap)
    allowed = sight.allowed
    if sight.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    elif allowed is not None and allowed.dtype != torch.bool:
        scores, allowed = scores + allowed, None
    if sight.choose is not None:
        allowed = sight.choose(scores, slice(None))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)  # (B, H, T, 1)
        return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # (B, H, T, 1)
    return scores.masked_fill(blind, 0).softmax(dim=-1).masked_fill(blind, 0)  # the first for its gradient: no nan


def by_rows(
    q: Tensor,
    k: Tensor,
    see: Callable[[slice], AttentionMask],
    scale: float | None,
    attn_logit_softcap: float | None,
    sinks: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:
    """attention_weights() of so many queries at a time, (B, H, ROWS, S), where no gradient needs all of them.

    see: what some of the queries see, by the reference.
    """
    T, learning = q.shape[2], torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    for start in range(0, T, T if learning else ROWS):
        rows = slice(start, T if learning else min(start + ROWS, T))
        yield rows, attention_weights(q[:, :, rows], k, see(rows), scale, attn_logit_softcap, sinks)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, scale: float) -> Tensor:
    grouped, allowed = q.shape[1] != k.shape[1], sight.allowed
    if q.device.type == "cpu":
        plain = not (sight.is_causal or sight.blind or torch.is_grad_enabled())
        if plain and q.shape[2] <= 16 and q.dtype == torch.float32:
            return decode_attention(q, k, v, allowed, scale)
        k = k.contiguous()  # SDPA's flash kernel takes rows only
    elif grouped and q.is_cuda and q.shape[2] == 1 and (allowed is None or allowed.dim() == 2 or allowed.shape[1] == 1):
        # One query: those of a key head stand where queries do, and no key is read twice.
        B, H, _, D = q.shape
        q = q.reshape(B, k.shape[1], -1, D)  # (B, K, H/K, D)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale).reshape(B, H, 1, -1)
    elif grouped and q.is_cuda and allowed is not None:
        # CUDA's kernels that take a mask do not take grouped keys: SDPA would fall to the slow math path.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, S, D)
        grouped = False
    if allowed is not None and allowed.dtype != torch.bool:
        if sight.blind and q.dtype != allowed.dtype:
            # Far keys alone are told apart by large numbers, of which 16 bits keep too little.
            allowed = allowed - allowed.amax(-1, keepdim=True).nan_to_num(neginf=0)
        allowed = allowed.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=sight.is_causal, scale=scale, enable_gqa=grouped
    )


def look(
    pattern: Pattern,
    query: TokenInfo,
    key: TokenInfo,
    n_heads: int,
    dtype: torch.dtype = torch.float32,
    slopes: Tensor | None = None,
    aligned: bool = False,
    kernel: str = "auto",
    plain_scores: bool = True,
) -> AttentionMask:
    """Choose the kernel for a pattern, and prepare what it needs.

    Args:
        query, key: positions (T,) or (B, T), and (S,) or (B, S), with documents and tokens where there are any.
        n_heads: H, query heads.
        dtype: of the activations.
        slopes: (H,), what a score loses with each position of distance (ALiBi, Press et al. 2022, arXiv:2108.12409).
        aligned: queries and keys are the same positions, in the same order.
        kernel: one of KERNELS to force it; "reference" goes with everything.
        plain_scores: attend() will be given neither attn_logit_softcap nor sinks.

    Raises UserError where the kernel asked for cannot compute it.
    """
    bounded = aligned and pattern.reach is not None and not (pattern.first and query.document is not None)
    windowed = (pattern.reach is not None and pattern.text == f"window({pattern.reach})") or pattern == CAUSAL
    able = {
        "reference": True,
        "sdpa": plain_scores and not pattern.by_score,
        "blockwise": aligned and plain_scores and not (pattern.by_score or pattern.ahead) and pattern.itself,
        "fold": bounded and not pattern.by_score,
        "flex": aligned and not pattern.by_score,
        "varlen": aligned and plain_scores and windowed and slopes is None and query.document is not None,
    }
    if kernel == "auto":
        kernel = _fastest(able, pattern, query, dtype, slopes)
    elif not able.get(kernel, False):
        known = "" if kernel in able else f"; there are: {', '.join(KERNELS)}"
        raise UserError(f"the attention kernel {kernel!r} does not compute {pattern.text} here{known}")
    if kernel == "flex":
        return AttentionMask(kernel=kernel, prepared=Flex(pattern, query, n_heads, slopes))
    if kernel == "varlen":
        return AttentionMask(kernel=kernel, prepared=Varlen(query.document, pattern.reach))
    if pattern == CAUSAL and aligned and query.document is None and slopes is None:
        return AttentionMask(is_causal=True, kernel=kernel)
    sight = AttentionMask(kernel=kernel, blind=not pattern.itself)
    if kernel == "fold":
        back = max(0, pattern.reach - 1)
        sight.fold = block, back, first = max(BLOCK, min(256, 1 << back.bit_length())), back, pattern.first
        folded = {
            name: [x.flatten(0, -2) for x in fold_places(getattr(query, name), block, back, first, INVALID_POSITION)]
            for name in ("position", "document", "token")
            if getattr(query, name) is not None
        }  # (blocks or B·blocks, block) and (..., first + back + block)
        query, key = (TokenInfo(**{name: parts[side] for name, parts in folded.items()}) for side in (0, 1))
    head, query, key = _apart(query, key, n_heads if pattern.by_head or slopes is not None else 1)
    bias = None
    if slopes is not None:
        bias = -slopes[:, None, None] * (query.position - key.position).abs()  # (H, T, S) or (B, H, T, S)
    if pattern.by_score:

        def choose(scores: Tensor, rows: slice) -> Tensor:
            some = {name: x[..., rows, :] for name, x in vars(query).items() if x is not None}  # (..., rows, 1)
            return pattern(head, TokenInfo(**some | {"scores": scores}), key)

        sight.allowed, sight.choose = bias, choose
        return sight
    sight.allowed = pattern(head, query, key)  # (T, S), (H, T, S) or (B, 1 or H, T, S)
    if bias is None and kernel == "blockwise":
        bias = torch.zeros((), dtype=dtype)
    if bias is not None:
        sight.allowed = bias.masked_fill(~sight.allowed, -torch.inf)
    if sight.allowed.dim() == 3:
        sight.allowed = sight.allowed[None]
    return sight


def _fastest(
    able: dict[str, bool], pattern: Pattern, query: TokenInfo, dtype: torch.dtype, slopes: Tensor | None
) -> str:
    T, half = query.position.shape[-1], dtype in (torch.bfloat16, torch.float16)
    if query.position.is_cuda:
        if T >= 1024 and not (pattern == CAUSAL and query.document is None and slopes is None):
            flash = half and torch.cuda.get_device_capability(query.position.device) >= (8, 0)
            return next(name for name in ("varlen", "flex", "reference") if able[name] and (flash or name != "varlen"))
    elif able["blockwise"] and dtype == torch.bfloat16 and T <= 1024:
        return "blockwise"
    elif able["fold"] and 2 * (pattern.reach + pattern.first) + 128 < T:
        return "fold"
    return "sdpa" if able["sdpa"] else "reference"


def _apart(query: TokenInfo, key: TokenInfo, heads: int) -> tuple[Tensor, TokenInfo, TokenInfo]:
    """Heads (H or 1, 1, 1); queries (..., T, 1) and keys (..., 1, S): ready to broadcast."""

    def spread(places: TokenInfo, dim: int) -> TokenInfo:
        given = {name: x for name, x in vars(places).items() if x is not None}
        return TokenInfo(**{n: (x if x.dim() == 1 else x[:, None]).unsqueeze(dim) for n, x in given.items()})

    device = query.position.device
    head = torch.arange(heads, device=device)[:, None, None] if heads > 1 else torch.zeros((), dtype=int, device=device)
    return head, spread(query, -1), spread(key, -2)
