"""torch's Muon with three Newton-Schulz iterations instead of five, and row-normalized updates."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinker.native import training as native
from thinker.runtime.process_group import local_tensor

# Quintics a·σ + b·σ³ + c·σ⁵ that move all singular values in [0.01, 1] into [0.73, 1.27] when applied one after the
# other. Each is optimal in the maximum norm on the interval that the previous one produces (Amsel et al. 2025, Polar
# Express, arXiv:2505.16932, theorem 3.1).
POLAR_EXPRESS_COEFFICIENTS = (
    (8.093369, -23.62043, 17.446152),
    (3.636586, -2.721927, 0.536546),
    (2.6613, -1.977155, 0.452616),
)


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
        assert not {"adjust_lr_fn", "ns_steps", "ns_coefficients"} & options.keys(), "options that are not supported"
        super().__init__(params, **options)
        self.dtype, self.row_beta, self.is_compiled, self.is_cautious = dtype, row_beta, is_compiled, is_cautious
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
                ranks = None if mesh is None else mesh.get_group()  # the ranks that share the rows (FSDP2)
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
                    updates = native.muon_momentum(grads, momenta, group["momentum"], group["nesterov"], self.dtype)
                    updates = orthogonalize(updates)
                    native.muon_update(
                        updates, row_second_moments, parameters, weight, lr, decay, self.is_cautious
                    )  # fmt: skip
                    continue
                stacked = self._momentum_updates(group, parameters, states, skip).to(self.dtype)  # (n, rows, columns)
                if ranks is None:
                    stacked = orthogonalize(stacked)
                else:
                    stacked = sharded_orthogonalize(stacked, shape[0], n_sharded, ranks)
                    n_sharded += len(parameters)
                normalize = _compiled() if self.is_compiled and ranks is None else normalize_rows
                stacked, means = normalize(stacked, torch.stack(row_second_moments), weight, skip, ranks)
                torch._foreach_copy_(row_second_moments, means.unbind())
                weights = [local_tensor(parameter) for parameter in parameters]
                if decay and self.is_cautious:
                    shrinks = stacked * torch.stack(weights) > 0  # (n, rows, columns); false if `skip`
                    torch._foreach_mul_(weights, torch.where(shrinks, 1 - decay, 1.0).unbind())
                elif decay:
                    torch._foreach_mul_(weights, 1 - decay if skip is None else torch.where(skip, 1.0, 1 - decay))
                torch._foreach_add_(weights, stacked.unbind(), alpha=-lr)

    def _momentum_updates(
        self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]], skip: Tensor | None
    ) -> Tensor:
        """Update the momentum of n matrices of one shape. Returns their updates, (n, rows, columns)."""
        momenta = [local_tensor(state["momentum_buffer"]) for state in states]
        grads = [local_tensor(parameter.grad) for parameter in parameters]
        if skip is not None:  # interpolating momentum with itself leaves it unchanged
            stacked = torch.stack(grads)
            grads = torch.where(skip, torch.stack(momenta), stacked, out=stacked).unbind()
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        return torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta)


def orthogonalize(x: Tensor) -> Tensor:
    """Approximate U·Vᵀ for each matrix U·S·Vᵀ of a batch (n, rows, columns), whose singular values move close to one.

    Three iterations replace five of torch's. Each has its own polynomial, and matrices are first divided by the fourth
    root of Σσ⁴. For n equal singular values this is n^¼ times too large, but the Frobenius norm is n^½ times.
    """
    wide = x.shape[1] <= x.shape[2]
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)  # so that the next product does not overflow
    gram = x @ x.mT if wide else x.mT @ x  # (n, short side, short side)
    norm = torch.linalg.matrix_norm(gram, keepdim=True).clamp(min=1e-14)  # (n, 1, 1): √Σσ⁴
    x, gram = x * norm.rsqrt(), gram / norm
    if max(x.shape[1:]) >= 2 * min(x.shape[1:]) and x.dtype == torch.float32:
        product = _product_of_polynomials(gram)
        return product @ x if wide else x @ product
    for step, (a, b, c) in enumerate(POLAR_EXPRESS_COEFFICIENTS):
        if step:
            gram = x @ x.mT if wide else x.mT @ x
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a) if wide else torch.baddbmm(x, x, factor, beta=a)
    return x


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """What all iterations together multiply a long matrix by, from its Gram matrix (n, r, r).

    None of its products has a long side. In bf16 small eigenvalues, squares of singular values, would be lost.
    """
    product = None
    for a, b, c in POLAR_EXPRESS_COEFFICIENTS:
        current = gram if product is None else product @ gram @ product  # all these matrices commute
        factor = torch.baddbmm(current, current, current, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
    return product


def sharded_orthogonalize(shards: Tensor, n_rows: int, first_owner: int, group: Any) -> Tensor:
    """orthogonalize() for n matrices of `n_rows` rows, sharded over the ranks as (n, local rows, columns).

    The ranks own the matrices in round-robin order, starting at `first_owner`. All ranks send their rows to the owner,
    which sends the results back. Each rank sends and receives twice its shards; no matrix is computed twice.
    """
    world_size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    n, local_rows, columns = shards.shape
    max_rows = -(-n_rows // world_size)  # as FSDP2 does; the last ranks may have fewer rows, or none
    rows_per_rank = [min(max_rows, max(0, n_rows - other * max_rows)) for other in range(world_size)]
    n_owned = [n // world_size + ((other - first_owner) % world_size < n % world_size) for other in range(world_size)]
    shard_sizes = [count * local_rows * columns for count in n_owned]  # this rank's rows, by owner
    owned_sizes = [n_owned[rank] * rows * columns for rows in rows_per_rank]  # this rank's matrices, by holder
    received = shards.new_empty(sum(owned_sizes))
    torch.distributed.all_to_all_single(received, shards.flatten(), owned_sizes, shard_sizes, group)
    pieces = [piece.view(n_owned[rank], -1, columns) for piece in received.split(owned_sizes) if len(piece)]
    if pieces:
        full = orthogonalize(torch.cat(pieces, dim=1))  # (matrices owned, n_rows, columns)
        received = torch.cat([piece.flatten() for piece in full.split(rows_per_rank, dim=1)])
    out = torch.empty_like(shards).flatten()
    torch.distributed.all_to_all_single(out, received, shard_sizes, owned_sizes, group)
    return out.view_as(shards)


def normalize_rows(
    updates: Tensor, row_second_moments: Tensor, weight: float | Tensor, skip: Tensor | None = None, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Divide each row of updates (n, rows, columns) by its root mean square over recent steps; keep each matrix's norm.

    `row_second_moments`: running means of squares (n, rows, 1); new squares enter with `weight`. They start at zero
    without a correction, since a common factor of a matrix cancels. `group`: the ranks that share the rows. Returns the
    updates (zeros if `skip`) and the new means.
    """
    squares = updates.float().square().mean(2, keepdim=True)  # (n, rows, 1)
    means = row_second_moments.lerp(squares, weight)
    scale = means.clamp(min=1e-30).rsqrt()
    before, after = squares.sum(1, keepdim=True), (squares * scale.square()).sum(1, keepdim=True)  # (n, 1, 1) each
    if group is not None:
        sums = torch.cat((before, after))
        torch.distributed.all_reduce(sums, group=group)
        before, after = sums.chunk(2)
    updates = updates * (scale * (before / after.clamp(min=1e-30)).sqrt())
    if skip is not None:
        updates = torch.where(skip, 0.0, updates)
    return updates.contiguous() if updates.is_cuda else updates, means  # CUDA's _foreach functions need equal strides


@cache
def _compiled() -> Callable:
    """Compiled normalize_rows(), made at its first use because importing the compiler takes seconds."""
    return torch.compile(normalize_rows, fullgraph=True, dynamic=False)
