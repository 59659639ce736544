"""Parts of a model whose weights are zero: setting them to zero, and finding them to remove
them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinker.features.pruning import pruning
from thinker.model import Thinker
from thinker.model.layers import Linear


def zero_groups(block: nn.Module) -> Tensor:
    """Which KV groups add nothing to the residual stream, (K,) bool."""
    columns = block.attention.o_proj.weight.detach()  # (C, H · D)
    return (columns == 0).all(dim=0).view(block.attention.n_kv_heads, -1).all(dim=1)


def zero_neurons(block: nn.Module) -> Tensor:
    """Which neurons of the MLP add nothing to the residual stream, (d_ff,) bool."""
    is_zero = (block.mlp.down_proj.weight == 0).all(dim=0)
    for matrix in input_matrices(block):
        if matrix.bias is None:  # with a bias, the neuron may still add something
            is_zero = is_zero | (matrix.weight == 0).all(dim=1)
    return is_zero


def input_matrices(block: nn.Module) -> list[Linear]:
    """The matrices of the MLP that read the residual stream; an ungated MLP has one."""
    mlp = block.mlp
    if hasattr(mlp, "gate_proj"):
        return [mlp.gate_proj, mlp.up_proj]
    return [mlp.up_proj]


@torch.no_grad()
def set_groups_to_zero(block: nn.Module, groups: Tensor) -> None:
    """Set all weights of these KV groups, indices (n,), to zero, with their query heads."""
    attention = block.attention
    K = attention.n_kv_heads
    for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
        rows = matrix.weight.unflatten(0, (K, -1))  # (K, D or shared · D, C)
        rows[groups] = 0
    columns = attention.o_proj.weight.unflatten(1, (K, -1))  # (C, K, shared · D)
    columns[:, groups] = 0


@torch.no_grad()
def set_neurons_to_zero(block: nn.Module, neurons: Tensor) -> None:
    """Set all weights of these neurons of the MLP, indices (n,), to zero."""
    for matrix in input_matrices(block):
        matrix.weight[neurons] = 0
    block.mlp.down_proj.weight[:, neurons] = 0


def lowest(scores: Tensor, is_zero: Tensor, n: int) -> Tensor:
    """The indices of the n parts with the lowest scores; parts that are zero come first."""
    return scores.to(is_zero.device).masked_fill(is_zero, -1).argsort(stable=True)[:n]


def remove_zeros(model: Thinker) -> tuple[Thinker, list[str]]:
    """Copy the model without the KV groups and neurons whose weights are zero; and what was
    removed, in words.

    Every layer keeps a KV group, and as many neurons as the layer that needs most of them.
    """
    n_layers = len(model.blocks)
    words = []
    groups = []
    for layer, block in enumerate(model.blocks):
        unused = zero_groups(block).nonzero()[:, 0].tolist()
        n_removed = min(len(unused), block.attention.n_kv_heads - 1)
        groups += [(layer, group) for group in unused[:n_removed]]
    neurons = [zero_neurons(block) for block in model.blocks]
    d_ff = max(1, *(int((~is_zero).sum()) for is_zero in neurons))
    if groups:
        total = sum(block.attention.n_kv_heads for block in model.blocks)
        words.append(f"{len(groups)} of {total} KV heads ({_by_layer(groups, n_layers)} by layer)")
        model = pruning.prune(model, groups)
    old_d_ff = model.config.d_ff
    if d_ff < old_d_ff:
        words.append(f"{old_d_ff - d_ff} of {old_d_ff} neurons in each layer")
        kept = [is_zero.int().argsort(stable=True)[:d_ff] for is_zero in neurons]
        model = pruning.prune_neurons(model, kept)
    return model, words


def _by_layer(groups: Sequence[tuple[int, int]], n_layers: int) -> str:
    counts = [0] * n_layers
    for layer, _ in groups:
        counts[layer] += 1
    return ", ".join(map(str, counts))
