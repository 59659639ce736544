"""A layer without scores: attention by sums over random features, whose state does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.attend import ROWS, AttentionMask
from thinker.model.attention import Attention
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.linear_attention import LinearState, linear_attention, random_features
from thinker.model.kv_cache import LinearLayer


class LinearAttention(Attention):
    """Choromanski et al. 2021 (arXiv:2009.14794) on the same projections, norms and rotations as any other layer.

    The features are neither parameters nor saved: they follow from their number, the head's width and the layer's.
    """

    def __init__(self, config: ThinkerConfig, n_features: int, layer: int) -> None:
        super().__init__(config, layer)
        self.n_features, self.layer = n_features, layer
        self.features: Tensor | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, cache: LinearLayer | None) -> Tensor:
        """As Attention.mix, with a state for a cache; `sight` holds the documents that are kept apart, if they are."""
        state = None if cache is None else LinearState(cache.sums, cache.shift)
        y, state = linear_attention(q, k, v, self.draw(q.device), state, sight.prepared)
        if cache is not None:
            cache.sums, cache.shift = state.sums, state.shift
        return y

    def weights(self, q: Tensor, k: Tensor, see: Callable[[slice], AttentionMask]) -> Tensor:
        """The matrix that the sums come to: what they make of values that are the unit vectors, some at a time."""
        sight, T = see(slice(None)), k.shape[2]
        weights = q.new_empty(*q.shape[:3], T, dtype=torch.float32)
        for keys in torch.arange(T, device=k.device).split(ROWS):
            unit = F.one_hot(keys, T).float().T.expand(*k.shape[:2], -1, -1)  # (B, K, T, ROWS)
            weights[..., keys] = LinearAttention.mix(self, q.float(), k.float(), unit, sight, None)
        return weights

    @torch._disable_dynamo  # as in kernels/blockwise.py
    def draw(self, device: torch.device) -> Tensor:
        """The features (m, D), drawn when they are first needed."""
        if self.features is None or self.features.device != device:
            self.features = random_features(self.n_features, self.head_dim, self.layer).to(device)
        return self.features
