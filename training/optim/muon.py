"""torch's Muon with three Newton-Schulz iterations instead of five, and row-normalized updates."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinker.native import training as native
from thinker.runtime.process_group import local_tensor
from thinker.training.optim.orthogonalize import orthogonalize, sharded_orthogonalize


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) with the row normalization of NorMuon.

    If a matrix has more rows than columns, its orthogonalized update moves some rows far and others hardly at all.
    NorMuon (Li et al. 2025, arXiv:2510.05491) divides each row by its root mean square over recent steps (`row_beta`)
    and keeps the norm of the matrix. torch orthogonalizes matrices one by one in bf16. Here all matrices of one shape
    form a batch in `dtype`, since a CPU without bf16 units is five times slower in bf16 than in fp32.

    is_cautious: weight decay applies only to weights that the update moves toward zero (Chen et al. 2025, Cautious
    Weight Decay, arXiv:2510.12402). is_fused: do everything but the matrix products in native/train.c, for fp32
    parameters on a CPU that are not sharded.
    """

    def __init__(
        self, params: Any, dtype: torch.dtype, row_beta: float = 0.95, is_compiled: bool = False,
        is_cautious: bool = False, is_fused: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        assert not {"adjust_lr_fn", "ns_steps", "ns_coefficients"} & options.keys(), (
            "options that are not supported"
        )
        super().__init__(params, **options)
        self.dtype, self.row_beta, self.is_compiled, self.is_cautious = (
            dtype,
            row_beta,
            is_compiled,
            is_cautious,
        )
        self.is_fused = is_fused

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Update the parameters, unless `found_inf`, a scalar on the device, is 1 (as in torch's fused AdamW)."""
        assert closure is None, "closures are not supported"
        skip = None if getattr(self, "found_inf", None) is None else self.found_inf > 0
        weight = 1 - self.row_beta if skip is None else skip.logical_not() * (1 - self.row_beta)
        n_sharded = 0  # matrices orthogonalized so far, to balance them over the ranks
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in by_shape.items():
                mesh = getattr(parameters[0], "device_mesh", None)
                ranks = (
                    None if mesh is None else mesh.get_group()
                )  # the ranks that share the rows (FSDP2)
                states = [self.state[parameter] for parameter in parameters]
                for parameter, state in zip(parameters, states):
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                        state["row_second_moment"] = torch.zeros_like(parameter[:, :1])
                row_second_moments = [local_tensor(state["row_second_moment"]) for state in states]
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5  # adjust_lr_fn "original"
                decay = group["lr"] * group["weight_decay"]
                if self.is_fused and ranks is None and skip is None:
                    grads = [parameter.grad for parameter in parameters]
                    momenta = [state["momentum_buffer"] for state in states]
                    updates = native.muon_momentum(
                        grads, momenta, group["momentum"], group["nesterov"], self.dtype
                    )
                    updates = orthogonalize(updates)
                    native.muon_update(
                        updates, row_second_moments, parameters, weight, lr, decay, self.is_cautious
                    )  # fmt: skip
                    continue
                stacked = self._momentum_updates(group, parameters, states, skip).to(
                    self.dtype
                )  # (n, rows, columns)
                if ranks is None:
                    stacked = orthogonalize(stacked)
                else:
                    stacked = sharded_orthogonalize(stacked, shape[0], n_sharded, ranks)
                    n_sharded += len(parameters)
                normalize = _compiled() if self.is_compiled and ranks is None else normalize_rows
                stacked, means = normalize(
                    stacked, torch.stack(row_second_moments), weight, skip, ranks
                )
                torch._foreach_copy_(row_second_moments, means.unbind())
                weights = [local_tensor(parameter) for parameter in parameters]
                if decay and self.is_cautious:
                    shrinks = (
                        stacked * torch.stack(weights) > 0
                    )  # (n, rows, columns); false if `skip`
                    torch._foreach_mul_(weights, torch.where(shrinks, 1 - decay, 1.0).unbind())
                elif decay:
                    torch._foreach_mul_(
                        weights, 1 - decay if skip is None else torch.where(skip, 1.0, 1 - decay)
                    )
                torch._foreach_add_(weights, stacked.unbind(), alpha=-lr)

    def _momentum_updates(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        skip: Tensor | None,
    ) -> Tensor:
        """Update the momentum of n matrices of one shape. Returns their updates, (n, rows, columns)."""
        momenta = [local_tensor(state["momentum_buffer"]) for state in states]
        grads = [local_tensor(parameter.grad) for parameter in parameters]
        if skip is not None:  # interpolating momentum with itself leaves it unchanged
            stacked = torch.stack(grads)
            grads = torch.where(skip, torch.stack(momenta), stacked, out=stacked).unbind()
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        return torch.stack(
            torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        )


def normalize_rows(
    updates: Tensor,
    row_second_moments: Tensor,
    weight: float | Tensor,
    skip: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Divide each row of updates (n, rows, columns) by its root mean square over recent steps; keep each matrix's norm.

    `row_second_moments`: running means of squares (n, rows, 1); new squares enter with `weight`. They start at zero
    without a correction, since a common factor of a matrix cancels. `group`: the ranks that share the rows. Returns the
    updates (zeros if `skip`) and the new means.
    """
    squares = updates.float().square().mean(2, keepdim=True)  # (n, rows, 1)
    means = row_second_moments.lerp(squares, weight)
    scale = means.clamp(min=1e-30).rsqrt()
    before, after = (
        squares.sum(1, keepdim=True),
        (squares * scale.square()).sum(1, keepdim=True),
    )  # (n, 1, 1) each
    if group is not None:
        sums = torch.cat((before, after))
        torch.distributed.all_reduce(sums, group=group)
        before, after = sums.chunk(2)
    updates = updates * (scale * (before / after.clamp(min=1e-30)).sqrt())
    if skip is not None:
        updates = torch.where(skip, 0.0, updates)
    return (
        updates.contiguous() if updates.is_cuda else updates,
        means,
    )  # CUDA's _foreach functions need equal strides


@cache
def _compiled() -> Callable:
    """Compiled normalize_rows(), made at its first use because importing the compiler takes seconds."""
    return torch.compile(normalize_rows, fullgraph=True, dynamic=False)
