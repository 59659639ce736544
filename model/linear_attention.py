"""The layer of linear attention: sums over random features, whose size does not grow with the text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.attention import Attention
from thinker.model.attention_dispatch import ROWS, AttentionMask
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.linear_attention import linear_attention, random_features
from thinker.model.kv_cache import LinearLayer


class LinearAttention(Attention):
    """Choromanski et al. 2021 (arXiv:2009.14794) with the projections, norms and RoPE of any other layer.

    The random features are neither parameters nor saved: they follow from n_features, head_dim and the layer.
    """

    def __init__(self, config: ThinkerConfig, n_features: int, layer: int) -> None:
        super().__init__(config, layer)
        self.n_features, self.layer = n_features, layer
        self._features: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LinearLayer | None) -> Tensor:
        """As Attention.attend, with a state as cache; uses only the document ids of the mask."""
        y, state = linear_attention(q, k, v, self.features(q.device), cache, mask.kernel_state)
        if cache is not None:
            cache.sums, cache.shift = state.sums, state.shift
        return y

    def weights(self, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
        """The matrix that the sums are equivalent to: the outputs for unit vectors as values, ROWS at a time."""
        T = k.shape[2]
        weights = q.new_empty(*q.shape[:3], T, dtype=torch.float32)
        for keys in torch.arange(T, device=k.device).split(ROWS):
            unit = F.one_hot(keys, T).float().T.expand(*k.shape[:2], -1, -1)  # (B, K, T, ROWS)
            weights[..., keys] = self.attend(q.float(), k.float(), unit, mask, None)
        return weights

    @torch._disable_dynamo  # as in kernels/blockwise_attention.py
    def features(self, device: torch.device) -> Tensor:
        """The random features (m, D), generated at the first use."""
        if self._features is None or self._features.device != device:
            self._features = random_features(self.n_features, self.head_dim, self.layer).to(device)
        return self._features
