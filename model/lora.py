"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): what fine-tuning adds to a matrix, in two thin ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.linear import Linear
from thinker.model.transformer import Thinker


class LoraLinear(Linear):
    """W x + scale · B A x: W is frozen, A (r, n_in) and B (n_out, r) learn, and B begins as zero."""

    def __init__(self, frozen: Linear, rank: int, scale: float) -> None:
        """`frozen`: whose weight and bias it takes, not a copy of them."""
        with torch.device("meta"):
            super().__init__(frozen.in_features, frozen.out_features)
        self.weight, self.bias = frozen.weight.requires_grad_(False), frozen.bias
        new = {"device": frozen.weight.device, "dtype": frozen.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, frozen.in_features, **new).normal_(0, frozen.in_features**-0.5))
        self.lora_B = nn.Parameter(torch.zeros(frozen.out_features, rank, **new))
        self.register_buffer("lora_scale", torch.tensor(scale, **new))

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        low = F.linear(x, self.lora_A.to(x.dtype))  # (..., r)
        return super().forward(x) + F.linear(low, self.lora_B.to(x.dtype)) * self.lora_scale.to(x.dtype)

    def effective_weight(self) -> Tensor:
        """W + scale · B A, (n_out, n_in)."""
        return self.weight + self.lora_scale * (self.lora_B @ self.lora_A)


def add_lora(model: Thinker, rank: int, scale: float = 1.0) -> None:
    """Put an adapter on every matrix of the blocks, and freeze all else. The model computes what it did."""
    model.requires_grad_(False)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, matrix in list(part.named_children()):
                if isinstance(matrix, Linear):
                    setattr(part, name, LoraLinear(matrix, rank, scale))


RANK_OF = "blocks.0.attention.o_proj.lora_A"  # (r, n_in): present where there are adapters


@torch.no_grad()
def merge_lora(model: Thinker) -> None:
    """Make every adapter part of its matrix: a plain Thinker again."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, matrix in list(part.named_children()):
                if isinstance(matrix, LoraLinear):
                    plain = Linear(matrix.in_features, matrix.out_features, bias=matrix.bias is not None)
                    plain.weight, plain.bias = nn.Parameter(matrix.effective_weight()), matrix.bias
                    setattr(part, name, plain)
    model.requires_grad_()
