"""torch's Muon, with the matrices of one shape orthogonalised together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the same update, state and groups.

    A small matrix keeps neither a GPU nor two cores busy, and torch takes them one by one, always in bf16, which a CPU
    without bf16 units does at a fifth of its speed in fp32: a third of a whole step of the quickstart. Here they
    go through the iteration in one batch a shape, in `dtype`.
    """

    def __init__(self, params: Any, dtype: torch.dtype, **options: Any) -> None:
        assert options.get("adjust_lr_fn") in (None, "original"), "not built"
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """One update. A parameter without a gradient stays as it is."""
        assert closure is None, "our loop computes the loss"
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)
                stacked = torch.stack(updates).to(self.dtype)  # (n, rows, columns)
                stacked = orthogonalise(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5  # adjust_lr_fn "original"
                for parameter, update in zip(parameters, stacked):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)


def orthogonalise(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz: a batch of matrices (n, rows, columns) with its singular values brought near one.

    A quintic polynomial of the matrix, `steps` times; its coefficients (a, b, c) are chosen to lift small singular
    values fast, so that the result's lie between about 0.7 and 1.2 instead of converging to 1.
    """
    a, b, c = coefficients
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.mT  # (n, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
