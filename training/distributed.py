"""One model on several ranks: what is done to it, in which order, and what their common step does differently.

The model itself knows nothing of it. Every rank sees its own rows of a batch; losses and gradients are summed over the
ranks and divided by the targets of them all, so that a step is the same however many make it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from thinker.model import Thinker
from thinker.runtime.process_group import DistContext, full_tensor
from thinker.training.activation_checkpointing import recompute
from thinker.training.config import TrainSection


def distribute(model: Thinker, train: TrainSection, dist: DistContext) -> nn.Module:
    """The model as a step calls it. First what is computed again, then compiling, then what the ranks share.

    "ddp": every rank has all of it, and gradients are summed while the backward pass still goes on. "fsdp": every rank
    has a part of each parameter's rows, and a block's parameters are gathered when their turn comes (ZeRO-3,
    Rajbhandari et al. 2020, arXiv:1910.02054), in the precision of the activations. Embedding and head are gathered in
    their own: thousands of gradients of a frequent token, added in bf16, were 40% off.
    """
    if train.checkpoint_every_n_blocks:
        recompute(model, train.checkpoint_every_n_blocks)
    if train.compile:
        # A program for each kind of layer; beyond this limit, of 8 unless raised, torch would go on without any.
        torch._dynamo.config.recompile_limit = 256
        for block in model.blocks:
            block.compile()  # in place: names of parameters stay as they are
    if dist.world_size == 1:
        return model
    assert train.parallel != "auto", "settled before"
    # Imported here: half a second that one process alone need not wait.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if train.parallel == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped.register_comm_hook(None, _summed)
        return wrapped
    cast = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(dist.device_type, (dist.world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy() if module is model else cast)
        module.set_gradient_divide_factor(1.0)  # a sum
        module.set_force_sum_reduction_for_comms(True)
    return model


def _summed(state, bucket):  # noqa: ANN001, ANN202 - torch refuses annotations that are text
    """DDP would divide by the number of ranks: exact for powers of two alone."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def gradient_sync(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Within it a backward pass sums gradients over the ranks only where `now`: at a batch's last micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(now)
    elif hasattr(model, "no_sync") and not now:  # DDP
        return model.no_sync()
    return contextlib.nullcontext()


def clip(model: Thinker, limit: float | None) -> Tensor:
    """Scale all gradients down to a global norm of `limit`, if given. Returns the norm before, of the whole model."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf")))
