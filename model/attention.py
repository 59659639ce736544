"""Self-attention: projections, norms, RoPE and cache, then attend(), or sums over random
features."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor, nn

from thinker.model.attention_dispatch import (
    ROWS,
    AttentionMask,
    attend,
    attention_scores,
    chunked_attention_weights,
)
from thinker.model.config import ThinkerConfig
from thinker.model.kernels import load_kernel
from thinker.model.kv_cache import LayerCache
from thinker.model.layers import Linear, new_qk_norm
from thinker.model.masks import CacheSlots
from thinker.model.positions import Rotation, apply_rotary_emb, heads_last

if TYPE_CHECKING:
    from thinker.model.kernels.linear_attention import LinearState

AnyCache = Union[LayerCache, "LinearState", None]


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query (K < H, Ainslie et al. 2023, arXiv:2305.13245) or
    multi-query (K = 1)."""

    def __init__(self, config: ThinkerConfig, layer: int) -> None:
        super().__init__()
        H, K = config.head_counts(layer)
        D = config.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = H, K, D
        self.scale = attention_scale(config)
        self.attn_logit_softcap = config.attn_logit_softcap
        self.q_proj = Linear(config.d_model, H * D, config.attention_bias)
        self.k_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.v_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.o_proj = Linear(H * D, config.d_model, config.attention_out_bias)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        if config.qk_norm:
            self.q_norm = new_qk_norm(config.qk_norm_type, H, D, config.norm_eps)
            self.k_norm = new_qk_norm(config.qk_norm_type, K, D, config.norm_eps)
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(H))

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        cache: AnyCache = None,
        slots: CacheSlots | None = None,
        token_values: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C). `rope`: None in a layer without RoPE."""
        q, k, v = self.query_key_value(x, rope, token_values)
        if slots is not None:  # a linear layer caches a state, which has no slots
            q, k, v = cache.update(q, k, v, slots)  # k, v: (B, K, S, D)
        y = self.attend(q, k, v, mask, cache)  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def query_key_value(
        self, x: Tensor, rope: Rotation, token_values: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """project(), where the values get those that ValueEmbeddings has for the tokens, (B, K, T,
        D)."""
        q, k, v = self.project(x, rope)
        if token_values is not None:
            v = v + token_values
        return q, k, v

    def project(self, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, D), k (B, K, T, D), v (B, K, T, D), with norm and RoPE applied
        to q and k."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, K, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            rope = heads_last(rope)
            q = apply_rotary_emb(q, rope)
            k = apply_rotary_emb(k, rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache
    ) -> Tensor:
        """q (B, H, T, D), k, v (B, K, S, D) -> (B, H, T, D). Only layers that keep a state use
        `cache`."""
        return attend(q, k, v, mask, self.scale, self.attn_logit_softcap, self.sinks)

    def weight_chunks(
        self, q: Tensor, k: Tensor, mask: AttentionMask
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield attention weights of the reference, (B, H, rows, S), for some queries at a time;
        see weights()."""
        mask_of = mask.reference_rows
        if mask_of is None:
            mask_of = partial(mask.slice_rows, q=q, k=k)
        return chunked_attention_weights(
            q, k, mask_of, self.scale, self.attn_logit_softcap, self.sinks
        )

    def weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Attention weights of the reference: q (B, H, T, D), k (B, K, S, D) -> (B, H, T, S)."""
        weights = None
        for rows, part in self.weight_chunks(q, k, mask):
            if rows == slice(0, q.shape[2]):
                return part  # all at once, with their gradients
            if weights is None:
                weights = part.new_empty(*q.shape[:3], k.shape[2])
            weights[:, :, rows] = part
        return weights

    def scores(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """What weights() takes the softmax of: q (B, H, T, D), k (B, K, S, D) -> (B, H, T, S)."""
        rows = slice(0, q.shape[2])
        if mask.reference_rows is not None:
            mask = mask.reference_rows(rows)
        else:
            mask = mask.slice_rows(rows, q, k)
        return attention_scores(q, k, mask, self.scale, self.attn_logit_softcap)


def attention_scale(config: ThinkerConfig) -> float:
    """The factor on the attention scores."""
    scale = config.attention_scale
    if scale is None:
        scale = config.head_dim**-0.5
    return scale / config.attention_temperature


class LinearAttention(Attention):
    """Linear attention (Choromanski et al. 2021, arXiv:2009.14794); projections, norms and RoPE are
    unchanged."""

    def __init__(self, config: ThinkerConfig, n_features: int, layer: int) -> None:
        super().__init__(config, layer)
        self.n_features = n_features
        self.layer = layer
        self._features: Tensor | None = None
        self._linear_attention = load_kernel("linear")
        self._random_features = load_kernel("random features")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LinearState | None
    ) -> Tensor:
        """Attention.attend() with a state as cache; uses only the document ids of the mask."""
        features = self.features(q.device)
        y, state = self._linear_attention(q, k, v, features, cache, mask.document_ids)
        if cache is not None:
            cache.sums = state.sums
            cache.shift = state.shift
        return y

    def weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """The attention matrix implied by the sums, ROWS keys at a time."""
        from thinker.model.inspection.implied_attention import implied_weights

        # Of the class, because hooks may stand in for the method of this layer.
        attend = partial(type(self).attend, self, mask=mask, cache=None)
        return implied_weights(attend, q.float(), k.float(), ROWS)

    @torch._disable_dynamo  # as in kernels/blockwise_attention.py
    def features(self, device: torch.device) -> Tensor:
        """Random features (m, D), generated at first use from n_features, head_dim and the layer
        index."""
        if self._features is None or self._features.device != device:
            features = self._random_features(self.n_features, self.head_dim, self.layer)
            self._features = features.to(device)
        return self._features
