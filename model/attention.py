"""Self-attention: projections, norms, RoPE and cache, then attend(), or sums over random features."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.activation_hooks import HookManager
from thinker.model.attention_dispatch import ROWS, AttentionMask, attend, chunked_attention_weights
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.linear_attention import linear_attention, random_features
from thinker.model.kv_cache import LayerCache, LinearLayer
from thinker.model.layers import FusedKernels, Linear, RMSNorm, project_jointly
from thinker.model.masks import CacheSlots
from thinker.model.positions import Rotation, apply_rotary_emb
from thinker.runtime.errors import UserError

AnyCache = LayerCache | LinearLayer | None


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query (K < H, Ainslie et al. 2023, arXiv:2305.13245) or multi-query (K = 1)."""

    def __init__(self, config: ThinkerConfig, layer: int) -> None:
        super().__init__()
        self.use_rope = layer not in (config.no_rope_layers or [])
        self.n_heads, self.n_kv_heads = H, K = config.head_counts(layer)
        self.head_dim = D = config.head_dim
        self.scale, self.attn_logit_softcap = (
            D**-0.5 / config.attention_temperature,
            config.attn_logit_softcap,
        )
        self.q_proj = Linear(config.d_model, H * D, config.attention_bias)
        self.k_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.v_proj = Linear(config.d_model, K * D, config.attention_bias)
        self.o_proj = Linear(H * D, config.d_model)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(H)) if config.attention_sinks else None
        self.register_module(
            "qkv_proj", None
        )  # q, k and v in one matrix (generation/decoders/inference_model.py)
        self.register_module("qk_norm", None)
        self.hooks: HookManager | None = None
        self.kernels: FusedKernels | None = None

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        cache: AnyCache = None,
        slots: CacheSlots | None = None,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.project(x, rope)
        if slots is not None:
            q, k, v = cache.update(q, k, v, slots)  # k, v: (B, K, S, D)
        if self.hooks is None:
            y = self.attend(q, k, v, mask, cache)  # (B, H, T, D)
        else:
            y = self._attend_with_hooks(q, k, v, mask, cache, is_cached=slots is not None)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def project(self, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, H, T, D), k (B, K, T, D), v (B, K, T, D), with norm and RoPE applied to q and k."""
        rope = rope if self.use_rope else None
        if self.kernels is not None:
            qkv = project_jointly(x, self.q_proj, self.k_proj, self.v_proj)  # (B, T, (H + 2K) · D)
            weights = (getattr(norm, "weight", None) for norm in (self.q_norm, self.k_norm))
            eps = getattr(self.q_norm, "eps", 0.0)
            return self.kernels.rotate_heads(
                qkv, self.n_heads, self.n_kv_heads, *weights, eps, rope
            )
        if self.qkv_proj is not None:
            heads = (
                self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            )  # (B, H + 2K, T, D)
            H, K = self.n_heads, self.n_kv_heads
            q, k = apply_rotary_emb(self.qk_norm(heads[:, : H + K]), rope).split((H, K), dim=1)
            return q, k, heads[:, H + K :]
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (
            heads.unflatten(-1, (-1, self.head_dim)) for heads in projected
        )  # (B, T, H or K, D)
        if not x.is_cuda:
            q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H or K, T, D)
            return apply_rotary_emb(self.q_norm(q), rope), apply_rotary_emb(self.k_norm(k), rope), v
        # Transposing first would cost a GPU one more pass over q and k.
        rope = rope and tuple(
            table.view(-1, 1, *table.shape[-2:]).transpose(1, 2) for table in rope
        )  # (B, T, 1, D)
        q, k = apply_rotary_emb(self.q_norm(q), rope), apply_rotary_emb(self.k_norm(k), rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache
    ) -> Tensor:
        """q (B, H, T, D), k, v (B, K, S, D) -> (B, H, T, D). Only layers that keep a state use `cache`."""
        return attend(q, k, v, mask, self.scale, self.attn_logit_softcap, self.sinks)

    def weight_chunks(
        self, q: Tensor, k: Tensor, mask: AttentionMask
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield attention weights of the reference, (B, H, rows, S), for some queries at a time; see weights()."""
        mask_of = mask.reference_rows or (lambda rows: mask.slice_rows(rows, q, k))
        return chunked_attention_weights(
            q, k, mask_of, self.scale, self.attn_logit_softcap, self.sinks
        )

    def weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """Attention weights of the reference: q (B, H, T, D), k (B, K, S, D) -> (B, H, T, S)."""
        weights = None
        for rows, part in self.weight_chunks(q, k, mask):
            if rows == slice(0, q.shape[2]):
                return part
            weights = part.new_empty(*q.shape[:3], k.shape[2]) if weights is None else weights
            weights[:, :, rows] = part
        return weights

    def _attend_with_hooks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache, is_cached: bool
    ) -> Tensor:
        """Call attend() with hooks on its inputs, the weights and the output of each head."""
        for point, x in (("q", q), ("k", k), ("v", v)):
            if point in self.hooks:  # later passes overwrite the cache that k and v view
                self.hooks(point, x.clone() if is_cached else x)
        weights = patched = None
        if "weights" in self.hooks:
            if cache is not None and not is_cached:
                raise UserError(
                    "attention.weights is not available with this kind of cache; run without a cache"
                )
            weights = self.weights(q, k, mask)  # (B, H, T, S)
            patched = self.hooks("weights", weights)
        if patched is weights:
            y = self.attend(q, k, v, mask, cache)  # (B, H, T, D)
        else:
            y = patched.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        if not any(point.startswith("heads") for point in self.hooks):
            return y
        heads = [y[:, head] for head in range(self.n_heads)]  # (B, T, D) each
        patched_heads = [self.hooks(f"heads.{head}", x) for head, x in enumerate(heads)]
        is_patched = any(new is not old for new, old in zip(patched_heads, heads))
        if is_patched or (
            torch.is_grad_enabled() and y.requires_grad
        ):  # recorded tensors need their gradients
            y = torch.stack(patched_heads, dim=1)
        return self.hooks("heads", y)


class LinearAttention(Attention):
    """Linear attention (Choromanski et al. 2021, arXiv:2009.14794); projections, norms and RoPE are unchanged."""

    def __init__(self, config: ThinkerConfig, n_features: int, layer: int) -> None:
        super().__init__(config, layer)
        self.n_features, self.layer = n_features, layer
        self._features: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LinearLayer | None
    ) -> Tensor:
        """Attention.attend() with a state as cache; uses only the document ids of the mask."""
        y, state = linear_attention(q, k, v, self.features(q.device), cache, mask.kernel_state)
        if cache is not None:
            cache.sums, cache.shift = state.sums, state.shift
        return y

    def weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """The attention matrix implied by the sums, computed with unit vectors as values, ROWS at a time."""
        T = k.shape[2]
        weights = q.new_empty(*q.shape[:3], T, dtype=torch.float32)
        for keys in torch.arange(T, device=k.device).split(ROWS):
            unit = F.one_hot(keys, T).float().T.expand(*k.shape[:2], -1, -1)  # (B, K, T, ROWS)
            weights[..., keys] = self.attend(q.float(), k.float(), unit, mask, None)
        return weights

    @torch._disable_dynamo  # as in kernels/blockwise_attention.py
    def features(self, device: torch.device) -> Tensor:
        """Random features (m, D), generated at first use from n_features, head_dim and the layer index."""
        if self._features is None or self._features.device != device:
            self._features = random_features(self.n_features, self.head_dim, self.layer).to(device)
        return self._features
