"""Linear layers for inference on a CPU: for few rows, and with the kernels of `native`."""

import torch
from torch import Tensor, nn

from thinker.model.layers import Linear, LogitTransform
from thinker.native.operations import linear, max_rows


def has_known_weight(module: nn.Module) -> bool:
    """Whether a module multiplies by its effective_weight(): a Linear, or a subclass that says
    so."""
    kind = type(module)
    if not isinstance(module, Linear) or "forward" in vars(module):
        return False
    return kind.forward is Linear.forward or "effective_weight" in vars(kind)


class FewRowsLinear(Linear):
    """A Linear that is faster for a few rows in fp32 on a CPU, without gradients and without a
    bias."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        rows = x.numel() // x.shape[-1]
        is_plain = self.bias is None and x.dtype == self.weight.dtype == torch.float32
        if not (is_plain and 4 <= rows <= 16) or torch.is_grad_enabled():
            return super().forward(x)
        # In this order MKL reads the matrix once for all rows: 8 rows take 1.4 times as long as 1,
        # not 2.4.
        columns = self.weight @ x.reshape(rows, -1).t().contiguous()  # (n_out, rows)
        return columns.t().reshape(*x.shape[:-1], -1)


class NativeLinear(FewRowsLinear):
    """A Linear that reads its matrix at the speed of memory for few rows on a CPU, without
    gradients."""

    @property
    def kernel_weight(self) -> Tensor:
        """The matrix for the kernels."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        has_many_rows = x.numel() > max_rows() * x.shape[-1]
        if has_many_rows or torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        y = linear(x.reshape(-1, x.shape[-1]).float(), self.weight, bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class TransformedHead(nn.Module):
    """An LM head for inference that scales or caps its logits."""

    def __init__(self, matrix: nn.Module, transform: LogitTransform) -> None:
        super().__init__()
        self.matrix = matrix
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        return self.transform(self.matrix(x))
