"""Training on several ranks with DDP or FSDP2.

Each rank computes its own rows of a batch. Losses and gradients are summed over the ranks and
divided by the total number of targets, so that a step does not depend on the number of ranks.
"""

import torch
from torch import nn

from thinker.checkpoint import model_class
from thinker.checkpoint.format import RANK_OF
from thinker.model import Thinker
from thinker.model.lora import add_lora
from thinker.runtime.ranks import DistContext, full_tensor
from thinker.training.settings.settings import Settings


def parallelize(model: Thinker, parallel: str, dist: DistContext) -> nn.Module:
    """Wrap the model for training on several ranks. parallel: "ddp" or "fsdp"."""
    if parallel == "ddp":
        return _with_ddp(model)
    return _with_fsdp(model, dist)


def _with_ddp(model: Thinker) -> nn.Module:
    """Every rank has the whole model, and gradients are summed during the backward pass."""
    # Imported here because it takes half a second and only several ranks need it.
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _sum_gradients)
    return wrapped


def warm_up_buckets(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Run a backward pass with zero gradients, so that all later passes, also of a resumed run, are
    equal.

    DDP assigns gradients to buckets in its first pass, and the last bits of a sum depend on the
    position there.
    """
    shape = (settings.train.micro_batch_size, settings.data.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    document_ids = tokens if settings.data.document_masking else None
    loss, _ = model(tokens, targets=tokens, document_ids=document_ids)
    (loss * 0).backward()


def _with_fsdp(model: Thinker, dist: DistContext) -> nn.Module:
    """Every rank has some rows of each parameter, and gathers the parameters of a block when it
    runs.

    That is ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054). Blocks are gathered in the precision
    of the activations. Embedding and head are gathered in fp32: in bf16, the sum of the thousands
    of gradients of a frequent token was 40% off.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    cast = MixedPrecisionPolicy(
        param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(dist.device_type, (dist.world_size,))
    for module in (*model.blocks, model):
        policy = MixedPrecisionPolicy() if module is model else cast
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # a sum
        module.set_force_sum_reduction_for_comms(True)
    return model


def _sum_gradients(state, bucket):  # noqa: ANN001, ANN202 - not every build of torch has the types
    """Sum gradients. DDP's average would divide by the number of ranks, which is exact only for
    powers of two."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def unwrapped_copy(model: Thinker) -> Thinker:
    """Copy a model for evaluation, without compilation and sharding. All ranks must call this."""
    weights = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        copy = model_class(model)(model.config)
    if RANK_OF in weights:
        add_lora(copy, len(weights[RANK_OF]))
    copy.load_state_dict(weights, assign=True)
    if model.config.tie_embeddings:
        copy.lm_head.weight = copy.embedding.weight
    copy.activation_dtype = model.activation_dtype
    return copy.requires_grad_().eval()
