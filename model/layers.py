"""Linear layers, norms, embeddings and activations."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.registries import ACTIVATIONS, NORMS

VALUE_EMBEDDING_STD = 0.5  # half of what a value has after initialization
# Primes above any vocabulary, so that the rows of all pairs with one token differ.
PREVIOUS_FACTOR = 1_000_003
CURRENT_FACTOR = 998_244_353


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the dtype of the activations."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__(n_in, n_out, bias=bias)

    def effective_weight(self) -> Tensor:
        """The matrix that forward() multiplies by, (n_out, n_in).

        A subclass that overrides forward() overrides this, too, if such a matrix exists. Inference
        then uses it.
        """
        return self.weight

    def cast_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the activations."""
        return self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        bias = self.bias
        if bias is not None:
            bias = bias.to(x.dtype)
        return F.linear(x, self.cast_weight(x.dtype), bias)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, arXiv:1910.07467), computed in fp32
    before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        # Unlike x.square().mean(), this reads x in its dtype and adds in fp32, without a copy of x
        # in fp32.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32)  # (..., 1)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + self.eps)  # (..., 1)
        return (x * scale).to(x.dtype) * self.weight.to(x.dtype)


class OnePlusRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight in fp32, as in Gemma; with a weight of 0, that is 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        x_in_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = x_in_fp32.square().mean(-1, keepdim=True)  # (..., 1)
        y = x_in_fp32 * torch.rsqrt(mean_square + self.eps)
        return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x − mean(x)) / √(var(x) + eps) · weight + bias (Ba et al. 2016, arXiv:1607.06450), computed
    in fp32.

    Cohere's models have it without a bias, OLMo without weight and bias.
    """

    def __init__(
        self, width: int, eps: float, has_weight: bool = True, has_bias: bool = True
    ) -> None:
        super().__init__(width, eps, elementwise_affine=has_weight, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        weight = _cast(self.weight, at_least_fp32)
        bias = _cast(self.bias, at_least_fp32)
        y = F.layer_norm(x.to(at_least_fp32), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.to(dtype)


class PerHeadNorm(nn.Module):
    """LayerNorm of each head without a bias; each head has a weight of its own.

    As in StableLM 2 and Cohere's models.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.eps = eps
        # A vector, not a matrix, so that it is trained as other norms are.
        self.weight = nn.Parameter(torch.ones(n_heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H, D) -> (B, T, H, D), in x's dtype."""
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        y = F.layer_norm(x.to(at_least_fp32), x.shape[-1:], eps=self.eps)
        weight = self.weight.view(self.n_heads, -1).to(at_least_fp32)  # (H, D)
        return (y * weight).to(x.dtype)


class AllHeadsNorm(RMSNorm):
    """RMSNorm of all heads at once, as in OLMo 2."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H, D) -> (B, T, H, D), in x's dtype."""
        return super().forward(x.flatten(-2)).view_as(x)


class Scale(nn.Module):
    """x · factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)."""
        return x * self.factor


class ScaledEmbedding(nn.Embedding):
    """An embedding times a factor, as in Gemma and Granite. An LM head that shares its weight does
    not have the factor."""

    def __init__(self, weight: Tensor, factor: float) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.factor = factor

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, C)."""
        return super().forward(tokens) * self.factor


class BigramEmbedding(nn.Module):
    """A row for each pair of the token before and the token, of a table with `n_rows` rows.

    A hash chooses the row, so several pairs share one. The first token of a document has no pair.
    The table starts at zero, or with model.init=normal as other matrices do.
    """

    def __init__(self, n_rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.empty(n_rows, width), freeze=False)

    def rows(self, before: Tensor, tokens: Tensor) -> Tensor:
        """The rows of pairs of ids, of any shape."""
        mixed = before * PREVIOUS_FACTOR + tokens * CURRENT_FACTOR
        return mixed % self.table.num_embeddings

    def forward(self, tokens: Tensor, token_before: Tensor | None, is_first: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, C).

        token_before: (B, 1), the id before each row; None: there is none. is_first: (T,) or (B, T),
        positions at which a document begins, which get 0.
        """
        before = F.pad(tokens, (1, -1))  # (B, T)
        if token_before is not None:
            before[:, :1] = token_before
        pairs = self.table(self.rows(before, tokens))  # (B, T, C)
        return pairs.masked_fill(is_first.unsqueeze(-1), 0)


class ValueEmbeddings(nn.Module):
    """A table per layer: a row for each token, which is added to the token's values in all heads.

    Each table has V · K · D parameters. Used in the records of modded-nanogpt
    (https://github.com/KellerJordan/modded-nanogpt, 2024).
    """

    def __init__(self, n_layers: int, vocab_size: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.tables = nn.ModuleList()
        for _ in range(n_layers):
            table = torch.empty(vocab_size, n_kv_heads * head_dim)
            self.tables.append(nn.Embedding.from_pretrained(table, freeze=False))

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Tokens (B, T) -> for each layer (B, K, T, D), in `dtype`."""
        values = []
        for table in self.tables:
            rows = table(tokens).to(dtype)  # (B, T, K·D)
            values.append(rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        return values


class LearnedPositions(nn.Embedding):
    """A vector per position. `offset`: the row of the first position."""

    def __init__(self, weight: Tensor, offset: int) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T) -> (..., C)."""
        return super().forward(positions + self.offset)


@dataclass(frozen=True)
class LogitTransform:
    """What some models do to their logits: z becomes cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """(..., V) -> (..., V)."""
        logits = logits * self.scale
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def gradient(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the raw logits, from the transformed ones and their gradient."""
        if self.softcap is None:
            return grad * self.scale
        return grad * (1 - (logits / self.softcap).square()) * self.scale


class TransformedLinear(Linear):
    """An LM head that scales or caps its logits."""

    def __init__(self, n_in: int, n_out: int, bias: bool, transform: LogitTransform) -> None:
        super().__init__(n_in, n_out, bias)
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        return self.transform(super().forward(x))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh, as in GPT-2 and Gemma."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


NORMS.register("rmsnorm", RMSNorm)
NORMS.register("rmsnorm_one_plus", OnePlusRMSNorm)
NORMS.register("layernorm", LayerNorm)
NORMS.register("layernorm_no_bias", partial(LayerNorm, has_bias=False))
NORMS.register("layernorm_no_weight", partial(LayerNorm, has_weight=False))


def new_qk_norm(kind: str, n_heads: int, head_dim: int, eps: float) -> nn.Module:
    """A norm of queries or keys (B, T, H, D), one of config.QK_NORMS."""
    if kind == "rmsnorm_width":
        return AllHeadsNorm(n_heads * head_dim, eps)
    if kind == "layernorm_per_head":
        return PerHeadNorm(n_heads, head_dim, eps)
    return NORMS.get(kind)(head_dim, eps)


ACTIVATIONS.register("silu", F.silu)
ACTIVATIONS.register("gelu", F.gelu)
ACTIVATIONS.register("gelu_tanh", gelu_tanh)
ACTIVATIONS.register("relu", F.relu)
ACTIVATIONS.register("relu2", relu_squared)
