"""Dropout that a training step on a CPU can replace by a fused kernel."""

from torch import Tensor, nn

from thinker.model.layers import FusedKernels


class Dropout(nn.Dropout):
    """nn.Dropout, which takes a fifth of a small model's step on a CPU without the fused kernel."""

    kernels: FusedKernels | None = None  # set by a training step

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)."""
        if self.kernels is not None and self.training and self.p > 0:
            return self.kernels.dropout(x, self.p)
        return super().forward(x)
