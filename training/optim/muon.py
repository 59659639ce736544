"""torch's Muon with three Newton-Schulz iterations instead of five, and row-normalized updates."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinker.native import training as native
from thinker.runtime.ranks import local_tensor
from thinker.training.optim.optimizers import OptimizerParts, adamw_of
from thinker.training.optim.orthogonalize import orthogonalize, sharded_orthogonalize


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) with the row
    normalization of NorMuon.

    If a matrix has more rows than columns, its orthogonalized update moves some rows far and others
    hardly at all. NorMuon (Li et al. 2025, arXiv:2510.05491) divides each row by its root mean
    square over recent steps (`row_beta`) and keeps the norm of the matrix. torch orthogonalizes
    matrices one by one in bf16. Here all matrices of one shape form a batch in `dtype`, since a CPU
    without bf16 units is five times slower in bf16 than in fp32.

    is_cautious: weight decay applies only to weights that the update moves toward zero (Chen et al.
    2025, Cautious Weight Decay, arXiv:2510.12402). is_fused: do everything but the matrix products
    in native/train.c, for fp32 parameters on a CPU that are not sharded.
    """

    reads_found_inf = True  # see step()

    def __init__(
        self,
        params: Any,
        dtype: torch.dtype,
        row_beta: float = 0.95,
        is_compiled: bool = False,
        is_cautious: bool = False,
        is_fused: bool = False,
        **options: Any,
    ) -> None:
        unsupported = {"adjust_lr_fn", "ns_steps", "ns_coefficients"}
        assert not unsupported & options.keys(), "options that are not supported"
        super().__init__(params, **options)
        self.dtype = dtype
        self.row_beta = row_beta
        self.is_compiled = is_compiled
        self.is_cautious = is_cautious
        self.is_fused = is_fused

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Update the parameters, unless `found_inf`, a scalar on the device, is 1 (as in torch's
        fused AdamW)."""
        assert closure is None, "closures are not supported"
        found_inf = getattr(self, "found_inf", None)
        skip = None
        new_share = 1 - self.row_beta  # of new squares in their running mean
        if found_inf is not None:
            skip = found_inf > 0
            new_share = skip.logical_not() * new_share
        n_sharded = 0  # matrices orthogonalized so far, to balance them over the ranks
        for group in self.param_groups:
            for parameters in _by_shape(group["params"]):
                self._create_state(parameters)
                ranks = _ranks_of_rows(parameters[0])
                if self.is_fused and ranks is None and skip is None:
                    self._fused_step(group, parameters)
                    continue
                self._plain_step(group, parameters, new_share, skip, ranks, n_sharded)
                if ranks is not None:
                    n_sharded += len(parameters)

    def _create_state(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["row_second_moment"] = torch.zeros_like(parameter[:, :1])

    def _fused_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update matrices of one shape with the kernels of native/train.c."""
        lr, decay = _rates(group, parameters[0].shape)
        states = [self.state[parameter] for parameter in parameters]
        grads = [parameter.grad for parameter in parameters]
        momenta = [state["momentum_buffer"] for state in states]
        row_second_moments = [state["row_second_moment"] for state in states]
        updates = native.muon_momentum(
            grads, momenta, group["momentum"], group["nesterov"], self.dtype
        )
        updates = orthogonalize(updates)
        weight = 1 - self.row_beta
        native.muon_update(
            updates, row_second_moments, parameters, weight, lr, decay, self.is_cautious
        )

    def _plain_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        new_share: float | Tensor,
        skip: Tensor | None,
        ranks: Any,
        n_sharded: int,
    ) -> None:
        """Update n matrices of one shape, whose rows `ranks` may share."""
        shape = parameters[0].shape
        states = [self.state[parameter] for parameter in parameters]
        if self.is_compiled and ranks is None:
            updates = self._compiled_momentum_updates(group, parameters, states, skip)
        else:
            updates = self._momentum_updates(group, parameters, states, skip)
        updates = updates.to(self.dtype)  # (n, rows, columns)
        if ranks is None:
            updates = orthogonalize(updates)
        else:
            updates = sharded_orthogonalize(updates, shape[0], n_sharded, ranks)

        row_second_moments = [local_tensor(state["row_second_moment"]) for state in states]
        means = torch.stack(row_second_moments)
        updates, means = self.normalize_rows(updates, means, new_share, skip, ranks)
        torch._foreach_copy_(row_second_moments, means.unbind())

        lr, decay = _rates(group, shape)
        weights = [local_tensor(parameter) for parameter in parameters]
        self._decay_weights(weights, updates, decay, skip)
        torch._foreach_add_(weights, updates.unbind(), alpha=-lr)

    def normalize_rows(
        self,
        updates: Tensor,
        row_second_moments: Tensor,
        weight: float | Tensor,
        skip: Tensor | None,
        ranks: Any,
    ) -> tuple[Tensor, Tensor]:
        """normalize_rows(), compiled if this optimizer is."""
        normalize = _compiled() if self.is_compiled and ranks is None else normalize_rows
        return normalize(updates, row_second_moments, weight, skip, ranks)

    def _decay_weights(
        self, weights: list[Tensor], updates: Tensor, decay: float, skip: Tensor | None
    ) -> None:
        if not decay:
            return
        if self.is_cautious:
            # (n, rows, columns); false if `skip`, as updates are zeros.
            shrinks = updates * torch.stack(weights) > 0
            torch._foreach_mul_(weights, torch.where(shrinks, 1 - decay, 1.0).unbind())
        elif skip is None:
            torch._foreach_mul_(weights, 1 - decay)
        else:
            torch._foreach_mul_(weights, torch.where(skip, 1.0, 1 - decay))

    def _momentum_updates(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        skip: Tensor | None,
    ) -> Tensor:
        """Update the momentum of n matrices of one shape. Returns their updates, (n, rows,
        columns)."""
        momenta = [local_tensor(state["momentum_buffer"]) for state in states]
        grads = [local_tensor(parameter.grad) for parameter in parameters]
        if skip is not None:  # interpolating momentum with itself leaves it unchanged
            stacked = torch.stack(grads)
            grads = torch.where(skip, torch.stack(momenta), stacked, out=stacked).unbind()
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        if not group["nesterov"]:
            return torch.stack(momenta)
        return torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))

    def _compiled_momentum_updates(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        states: list[dict[str, Tensor]],
        skip: Tensor | None,
    ) -> Tensor:
        """As _momentum_updates(), in `dtype`, with little more than half of the memory traffic."""
        buffers = [state["momentum_buffer"] for state in states]
        momenta = torch.stack(buffers)  # (n, rows, columns)
        grads = torch.stack([parameter.grad for parameter in parameters])
        # A number would be compiled again in each step in which it changes.
        momentum = torch.full((), group["momentum"], dtype=momenta.dtype, device=momenta.device)
        options = (momentum, group["nesterov"], skip, self.dtype)
        new_momenta, updates = _compiled_momenta()(grads.flatten(), momenta.flatten(), *options)
        torch._foreach_copy_(buffers, new_momenta.view(momenta.shape).unbind())
        return updates.view(momenta.shape)


def muon_and_adamw(parts: OptimizerParts) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and the head, AdamW for the embedding and the norms.

    Muon moves each matrix by its orthogonalized momentum, which has the same size in every
    direction. It also trains the head, often left to AdamW (Loshchilov & Hutter 2019,
    arXiv:1711.05101), as it separates rare words with similar neighbors better
    (docs/development/experiments.md).
    """
    model, config = parts.model, parts.config
    rest = dict(parts.groups)
    matrices = [rest.pop(kind) for kind in ("matrices", "head") if kind in rest]
    dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
    muon = Muon(
        matrices,
        dtype=dtype,
        is_compiled=model.is_compiled and model.device.type == "cuda",
        is_cautious=config.cautious_weight_decay,
        is_fused=parts.is_fused and model.embedding.weight.dtype == torch.float32,
        momentum=config.momentum,
    )
    for group in muon.param_groups:
        group["final_momentum"] = config.momentum  # see Optimizers.set_momentum()
    return [muon, adamw_of(rest, parts)]


def _by_shape(parameters: list[Tensor]) -> list[list[Tensor]]:
    """The parameters that have a gradient, in lists of equal shapes."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(tuple(parameter.shape), []).append(parameter)
    return list(groups.values())


def _ranks_of_rows(parameter: Tensor) -> Any:
    """The process group of the ranks that share the rows of a parameter (FSDP2), or None."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else mesh.get_group()


def _rates(group: dict[str, Any], shape: tuple[int, ...]) -> tuple[float, float]:
    """The learning rate of matrices of a shape (adjust_lr_fn "original"), and how much they
    decay."""
    lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
    return lr, group["lr"] * group["weight_decay"]


def normalize_rows(
    updates: Tensor,
    row_second_moments: Tensor,
    weight: float | Tensor,
    skip: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Divide each row of updates (n, rows, columns) by its root mean square over recent steps; keep
    each matrix's norm.

    `row_second_moments`: running means of squares (n, rows, 1); new squares enter with `weight`.
    They start at zero without a correction, since a common factor of a matrix cancels. `group`: the
    ranks that share the rows. Returns the updates (zeros if `skip`) and the new means.
    """
    squares = updates.float().square().mean(2, keepdim=True)  # (n, rows, 1)
    means = row_second_moments.lerp(squares, weight)
    scale = means.clamp(min=1e-30).rsqrt()
    before = squares.sum(1, keepdim=True)  # (n, 1, 1)
    after = (squares * scale.square()).sum(1, keepdim=True)  # (n, 1, 1)
    if group is not None:
        sums = torch.cat((before, after))
        torch.distributed.all_reduce(sums, group=group)
        before, after = sums.chunk(2)
    updates = updates * (scale * (before / after.clamp(min=1e-30)).sqrt())
    if skip is not None:
        updates = torch.where(skip, 0.0, updates)
    if updates.is_cuda:  # whose _foreach functions need equal strides
        updates = updates.contiguous()
    return updates, means


@cache
def _compiled() -> Callable:
    """Compiled normalize_rows(), made at its first use because importing the compiler takes
    seconds."""
    return torch.compile(normalize_rows, fullgraph=True, dynamic=False)


def next_momenta(
    grads: Tensor,
    momenta: Tensor,
    momentum: Tensor,
    nesterov: bool,
    skip: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The momenta after a step (unchanged if `skip`) and the updates in `dtype`, all of one
    shape."""
    if skip is not None:  # interpolating momentum with itself leaves it unchanged
        grads = torch.where(skip, momenta, grads)
    momenta = momenta.lerp(grads, 1 - momentum)
    updates = momenta
    if nesterov:
        updates = grads.lerp(momenta, momentum)
    return momenta, updates.to(dtype)


@cache
def _compiled_momenta() -> Callable:
    """Compiled next_momenta(): one kernel, and one program for all sizes of flat tensors."""
    compiled = torch.compile(next_momenta, fullgraph=True)

    def call(grads: Tensor, momenta: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        for tensor in (grads, momenta):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(grads, momenta, *options)

    return call
