"""Grouped-query self-attention: projections, norms, RoPE, cache, then one call of attend()."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attend import attend, attention_weights, causal
from model.cache import KVCache, Placement
from model.config import ThinkerConfig
from model.norm import RMSNorm
from model.rope import rotate


class Linear(nn.Linear):
    """A matrix without bias, kept in its own precision and cast to that of the activations where it is used."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query (K < H, Ainslie et al. 2023, arXiv:2305.13245) or multi-query (K = 1)."""

    def __init__(self, config: ThinkerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.d_model, config.n_heads * config.head_dim)
        self.k_proj = Linear(config.d_model, config.n_kv_heads * config.head_dim)
        self.v_proj = Linear(config.d_model, config.n_kv_heads * config.head_dim)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.d_model)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, D), k (B, K, T, D), v (B, K, T, D), the first two normed and rotated."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, H·D) -> (B, H, T, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], place: Placement, cache: KVCache | None = None) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.store(self.layer, k, v, place)  # (B, K, S, D)
        y = attend(q, k, v, allowed=place.allowed, is_causal=place.is_causal)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def weights(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The causal attention matrix of a whole sequence, by the reference: x (B, T, C) -> (B, H, T, T)."""
        q, k, _ = self.project(x, rope)
        at = torch.arange(x.shape[1], device=x.device)
        return attention_weights(q, k, causal(at[:, None], at))
