"""Grouped-query self-attention: projections, norms, RoPE, cache, then one call of attend()."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinker.model.attend import AttentionMask, attend, by_rows
from thinker.model.config import ThinkerConfig
from thinker.model.kv_cache import LayerCache
from thinker.model.linear import Linear
from thinker.model.norm import RMSNorm
from thinker.model.rope import rotate


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query (K < H, Ainslie et al. 2023, arXiv:2305.13245) or multi-query (K = 1)."""

    def __init__(self, config: ThinkerConfig, layer: int) -> None:
        super().__init__()
        self.turns = layer not in (config.no_rope_layers or [])
        (H, K), D = config.head_counts(layer), config.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim, self.attn_logit_softcap = H, K, D, config.attn_logit_softcap
        self.q_proj = Linear(config.d_model, H * D, config.attention_bias)
        self.k_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.v_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.o_proj = Linear(H * D, config.d_model)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(H)) if config.attention_sinks else None
        self.register_module("qkv_proj", None)  # the three in one piece, to decode (generation/snapshot.py)
        self.register_module("qk_norm", None)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, D), k (B, K, T, D), v (B, K, T, D), the first two normed and rotated."""
        rope = rope if self.turns else None
        if self.qkv_proj is not None:
            heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H + 2K, T, D)
            H, K = self.n_heads, self.n_kv_heads
            q, k = rotate(self.qk_norm(heads[:, : H + K]), rope).split((H, K), dim=1)
            return q, k, heads[:, H + K :]
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, H·D) -> (B, H, T, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, sight: AttentionMask, cache: LayerCache | None = None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        y = self.mix(*self.project(x, rope), sight, cache)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, cache: LayerCache | None) -> Tensor:
        """Let the queries look at what the cache holds and at the new keys: q (B, H, T, D) -> (B, H, T, D)."""
        if cache is not None:
            q, k, v = cache.store(q, k, v, sight)  # k, v: (B, K, S, D)
        return attend(q, k, v, sight, self.head_dim**-0.5, self.attn_logit_softcap, self.sinks)

    def weights(self, q: Tensor, k: Tensor, see: Callable[[slice], AttentionMask]) -> Tensor:
        """What each query takes of each key, by the reference: q (B, H, T, D), k (B, K, S, D) -> (B, H, T, S).

        `see` says what some of the queries see; little memory is taken beside the matrix itself.
        """
        parts = by_rows(q, k, see, self.head_dim**-0.5, self.attn_logit_softcap, self.sinks)
        rows, first = next(parts)
        if rows.stop == q.shape[2]:
            return first
        weights = first.new_empty(*q.shape[:3], k.shape[2])
        weights[:, :, rows] = first
        for rows, part in parts:
            weights[:, :, rows] = part
        return weights
