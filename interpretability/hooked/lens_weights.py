"""The weights of a Thinker under TransformerLens's names, in its orientation: x @ W.

In shapes, V is the size of the vocabulary, F the width of the MLP; the other letters are those of
hook_names.py. A bias that the model does not have is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinker.interpretability.hooked.hook_names import factor_of, norms_of, their_channels
from thinker.model import Thinker
from thinker.model.layers import ScaledEmbedding
from thinker.runtime.errors import UserError


def _transposed(linear: nn.Linear) -> Tensor:
    """The matrix that the inputs are multiplied by, (n_in, n_out)."""
    return linear.effective_weight().T


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias


class AttentionWeights:
    """The weights of a block's attention by head. Each KV head is repeated for the heads that it
    serves; `_W_K`, `_W_V`, `_b_K` and `_b_V` have each KV head once. order: their_channels()."""

    def __init__(self, block: nn.Module, order: Tensor | None) -> None:
        self._attention = block.attention
        self._order = order
        self._factor = factor_of(block.after_attention)

    def _by_head(self, name: str) -> Tensor:
        """(H or K, C, D)."""
        matrix = _transposed(getattr(self._attention, name))
        by_head = matrix.unflatten(1, (-1, self._attention.head_dim)).transpose(0, 1)
        return self._reorder(by_head, name)

    def _bias_by_head(self, name: str) -> Tensor:
        """(H or K, D)."""
        bias = _bias(getattr(self._attention, name))
        return self._reorder(bias.unflatten(0, (-1, self._attention.head_dim)), name)

    def _reorder(self, x: Tensor, name: str) -> Tensor:
        if self._order is None or name == "v_proj":
            return x
        return x[..., self._order]

    def _repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self._attention.n_heads // len(x), dim=0)

    @property
    def W_Q(self) -> Tensor:
        """(H, C, D)."""
        return self._by_head("q_proj")

    @property
    def _W_K(self) -> Tensor:
        return self._by_head("k_proj")

    @property
    def _W_V(self) -> Tensor:
        return self._by_head("v_proj")

    @property
    def W_K(self) -> Tensor:
        """(H, C, D)."""
        return self._repeat(self._W_K)

    @property
    def W_V(self) -> Tensor:
        """(H, C, D)."""
        return self._repeat(self._W_V)

    @property
    def W_O(self) -> Tensor:
        """(H, D, C)."""
        w = self._factor * _transposed(self._attention.o_proj)
        return w.unflatten(0, (self._attention.n_heads, -1))

    @property
    def b_Q(self) -> Tensor:
        """(H, D)."""
        return self._bias_by_head("q_proj")

    @property
    def _b_K(self) -> Tensor:
        return self._bias_by_head("k_proj")

    @property
    def _b_V(self) -> Tensor:
        return self._bias_by_head("v_proj")

    @property
    def b_K(self) -> Tensor:
        """(H, D)."""
        return self._repeat(self._b_K)

    @property
    def b_V(self) -> Tensor:
        """(H, D)."""
        return self._repeat(self._b_V)

    @property
    def b_O(self) -> Tensor:
        """(C,)."""
        return self._factor * _bias(self._attention.o_proj)


class MLPWeights:
    """The weights of a block's MLP. Without a gate, W_gate is None."""

    def __init__(self, block: nn.Module) -> None:
        self._mlp = block.mlp
        self._factor = factor_of(block.after_mlp)

    def _linear(self, name: str) -> nn.Linear:
        linear = getattr(self._mlp, name, None)
        if linear is None:
            raise UserError(f"an MLP of type {type(self._mlp).__name__} has no {name}")
        return linear

    @property
    def W_in(self) -> Tensor:
        """(C, F)."""
        return _transposed(self._linear("up_proj"))

    @property
    def W_gate(self) -> Tensor | None:
        """(C, F); None without a gate."""
        if not hasattr(self._mlp, "gate_proj"):
            return None
        return _transposed(self._mlp.gate_proj)

    @property
    def W_out(self) -> Tensor:
        """(F, C)."""
        return self._factor * _transposed(self._linear("down_proj"))

    @property
    def b_in(self) -> Tensor:
        """(F,)."""
        return _bias(self._linear("up_proj"))

    @property
    def b_out(self) -> Tensor:
        """(C,)."""
        return self._factor * _bias(self._linear("down_proj"))


class BlockWeights:
    """A block with its attention and MLP under their names in TransformerLens."""

    def __init__(self, block: nn.Module, order: Tensor | None) -> None:
        self.attn = AttentionWeights(block, order)
        self.mlp = MLPWeights(block)
        vars(self).update(norms_of(block))  # ln1, ln2, ...


class Embed:
    """Maps tokens (...) to their embeddings (..., C)."""

    def __init__(self, model: Thinker) -> None:
        self._model = model

    def __call__(self, tokens: Tensor) -> Tensor:
        """(...) -> (..., C)."""
        return self._model.embedding(tokens)

    @property
    def W_E(self) -> Tensor:
        """(V, C)."""
        embedding = self._model.embedding
        if isinstance(embedding, ScaledEmbedding):
            return embedding.factor * embedding.weight
        return embedding.weight


class Unembed:
    """Maps normalized residuals (..., C) to logits (..., V), before a soft cap."""

    def __init__(self, model: Thinker) -> None:
        self._model = model

    def __call__(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V)."""
        return x @ self.W_U.to(x.dtype) + self.b_U.to(x.dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        if self._model.logit_transform is None:
            return x
        return self._model.logit_transform.scale * x

    @property
    def W_U(self) -> Tensor:
        """(C, V)."""
        return self._scaled(_transposed(self._model.lm_head))

    @property
    def b_U(self) -> Tensor:
        """(V,)."""
        return self._scaled(_bias(self._model.lm_head))


class LensWeights:
    """The weights of all layers, stacked. HookedThinker inherits them; its `model` is the
    Thinker."""

    model: Thinker

    @property
    def blocks(self) -> list[BlockWeights]:
        """The weights by layer, such as blocks[3].attn.W_O."""
        order = their_channels(self.model)
        return [BlockWeights(block, order) for block in self.model.blocks]

    def _stack(self, part: str, name: str) -> Tensor:
        weights = [getattr(getattr(block, part), name) for block in self.blocks]
        if len({weight.shape for weight in weights}) > 1:
            raise UserError(f"{name} differs in shape between layers; use blocks[i].{part}.{name}")
        return torch.stack(weights)

    @property
    def ln_final(self) -> nn.Module:
        """The norm before the logits."""
        return self.model.norm

    @property
    def embed(self) -> Embed:
        """The embedding."""
        return Embed(self.model)

    @property
    def unembed(self) -> Unembed:
        """The LM head."""
        return Unembed(self.model)

    @property
    def W_E(self) -> Tensor:
        """(V, C)."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Tensor:
        """The learned positions, (n_ctx, C)."""
        if self.model.positions is None:
            raise UserError("this model has no learned positions, so it has no W_pos")
        return self.model.positions.weight[self.model.positions.offset :]

    @property
    def W_U(self) -> Tensor:
        """(C, V)."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        """(V,)."""
        return self.unembed.b_U

    @property
    def W_Q(self) -> Tensor:
        """(layers, H, C, D)."""
        return self._stack("attn", "W_Q")

    @property
    def W_K(self) -> Tensor:
        """(layers, H, C, D); each KV head is repeated for the heads that it serves."""
        return self._stack("attn", "W_K")

    @property
    def W_V(self) -> Tensor:
        """(layers, H, C, D); each KV head is repeated for the heads that it serves."""
        return self._stack("attn", "W_V")

    @property
    def W_O(self) -> Tensor:
        """(layers, H, D, C)."""
        return self._stack("attn", "W_O")

    @property
    def b_Q(self) -> Tensor:
        """(layers, H, D)."""
        return self._stack("attn", "b_Q")

    @property
    def b_K(self) -> Tensor:
        """(layers, H, D)."""
        return self._stack("attn", "b_K")

    @property
    def b_V(self) -> Tensor:
        """(layers, H, D)."""
        return self._stack("attn", "b_V")

    @property
    def b_O(self) -> Tensor:
        """(layers, C)."""
        return self._stack("attn", "b_O")

    @property
    def W_in(self) -> Tensor:
        """(layers, C, F)."""
        return self._stack("mlp", "W_in")

    @property
    def W_gate(self) -> Tensor | None:
        """(layers, C, F); None without gates."""
        if self.blocks[0].mlp.W_gate is None:
            return None
        return self._stack("mlp", "W_gate")

    @property
    def W_out(self) -> Tensor:
        """(layers, F, C)."""
        return self._stack("mlp", "W_out")

    @property
    def b_in(self) -> Tensor:
        """(layers, F)."""
        return self._stack("mlp", "b_in")

    @property
    def b_out(self) -> Tensor:
        """(layers, C)."""
        return self._stack("mlp", "b_out")
