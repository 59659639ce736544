"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) for fine-tuning."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.layers import Linear
from thinker.model.transformer import Thinker


class LoraLinear(Linear):
    """W x + scale · B A x. W is frozen; A (r, n_in) and B (n_out, r) are trained, and B starts at
    zero."""

    def __init__(self, frozen: Linear, rank: int, scale: float) -> None:
        with torch.device("meta"):  # shares the weight and bias of `frozen`
            super().__init__(frozen.in_features, frozen.out_features)
        self.weight = frozen.weight.requires_grad_(False)
        self.bias = frozen.bias
        like = {"device": frozen.weight.device, "dtype": frozen.weight.dtype}
        A = torch.empty(rank, frozen.in_features, **like)
        self.lora_A = nn.Parameter(A.normal_(0, frozen.in_features**-0.5))
        self.lora_B = nn.Parameter(torch.zeros(frozen.out_features, rank, **like))
        self.register_buffer("lora_scale", torch.tensor(scale, **like))

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        low = F.linear(x, self.lora_A.to(x.dtype))  # (..., r)
        change = F.linear(low, self.lora_B.to(x.dtype))  # (..., n_out)
        return super().forward(x) + change * self.lora_scale.to(x.dtype)

    def effective_weight(self) -> Tensor:
        """W + scale · B A, (n_out, n_in)."""
        return self.weight + self.lora_scale * (self.lora_B @ self.lora_A)


def add_lora(model: Thinker, rank: int, scale: float = 1.0) -> None:
    """Add an adapter to every matrix of the blocks and freeze all other weights. The outputs do not
    change."""
    model.requires_grad_(False)
    for module, name, matrix in _block_matrices(model):
        setattr(module, name, LoraLinear(matrix, rank, scale))


@torch.no_grad()
def merge_lora(model: Thinker) -> None:
    """Merge every adapter into its matrix, which leaves a plain Thinker."""
    for module, name, matrix in _block_matrices(model):
        if isinstance(matrix, LoraLinear):
            plain = Linear(matrix.in_features, matrix.out_features, bias=matrix.bias is not None)
            plain.weight = nn.Parameter(matrix.effective_weight())
            plain.bias = matrix.bias
            setattr(module, name, plain)
    model.requires_grad_()


def _block_matrices(model: Thinker) -> Iterator[tuple[nn.Module, str, Linear]]:
    """Yield each matrix of the blocks with its parent module and its name in it."""
    for module in list(model.blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                yield module, name, child
