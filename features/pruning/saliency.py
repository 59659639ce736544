"""Scores of the parts of a model that can be removed: KV groups with their heads, neurons of MLPs, and layers.

- "gradient": how much the loss would change to first order, |Σ z · ∂L/∂z| summed over the sequences (Molchanov et al.
  2019, arXiv:1906.10771), where z is what the part computes.
- "activation": mean |z| times the norm of its columns in the output matrix, as in Wanda (Sun et al. 2023,
  arXiv:2306.11695); for a layer, 1 - the cosine of its input and output (Men et al. 2024, arXiv:2403.03853).
- "magnitude": the product of the norms of its matrices. "random": for comparison.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.model import Thinker

METHODS = ("gradient", "activation", "magnitude", "random")
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Scores:
    """The higher, the more important. Only scores of one kind can be compared."""

    groups: list[Tensor]  # per layer (K,)
    neurons: list[Tensor]  # per layer (d_ff,)
    layers: Tensor  # (n_layers,)


def score_parts(
    model: Thinker, tokens: Tensor, targets: Tensor, method: str, seed: int = 0
) -> Scores:
    """Score all parts of a model on sequences, (N, T) each."""
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        shapes = [
            (block.attention.n_kv_heads, block.mlp.down_proj.in_features) for block in model.blocks
        ]
        groups, neurons = (
            [torch.rand(shape[i], generator=generator) for shape in shapes] for i in (0, 1)
        )
        return Scores(groups, neurons, torch.rand(len(shapes), generator=generator))
    if method == "magnitude":
        return _by_magnitude(model)
    return _by_activity(model, tokens, targets, by_gradient=method == "gradient")


@torch.no_grad()
def _by_magnitude(model: Thinker) -> Scores:
    groups, neurons, layers = [], [], []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        K = attention.n_kv_heads
        per_group = [
            matrix.weight.view(K, -1).norm(dim=1) for matrix in (attention.k_proj, attention.v_proj)
        ]
        per_group.append(attention.q_proj.weight.reshape(K, -1).norm(dim=1))
        per_group.append(attention.o_proj.weight.T.reshape(K, -1).norm(dim=1))  # from (H · D, C)
        groups.append(torch.stack(per_group).prod(dim=0).cpu())
        rows = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1)
        neurons.append((rows * mlp.down_proj.weight.norm(dim=0)).cpu())
        layers.append(attention.o_proj.weight.norm() * mlp.down_proj.weight.norm())
    return Scores(groups, neurons, torch.stack(layers).cpu())


def _by_activity(model: Thinker, tokens: Tensor, targets: Tensor, by_gradient: bool) -> Scores:
    n_layers, rows = len(model.blocks), max(1, BATCH_TOKENS // tokens.shape[1])
    groups = [torch.zeros(block.attention.n_kv_heads) for block in model.blocks]
    neurons = [torch.zeros(block.mlp.down_proj.in_features) for block in model.blocks]
    layers = torch.zeros(n_layers)
    names = ("embedding", "blocks.*", "blocks.*.attention.heads", "blocks.*.mlp.hidden")
    for part, wanted in zip(tokens.split(rows), targets.split(rows)):
        start = {"embedding": lambda x: x.detach().requires_grad_()} if by_gradient else {}
        with torch.set_grad_enabled(by_gradient), model.patch(start), model.record(*names) as cache:
            loss, _ = model(part, targets=wanted)
        inputs = ["embedding", *(f"blocks.{layer}" for layer in range(n_layers - 1))]
        gradients = dict.fromkeys(cache)
        if by_gradient:
            gradients = dict(zip(cache, torch.autograd.grad(loss, list(cache.values()))))
        for layer, block in enumerate(model.blocks):
            name = f"blocks.{layer}"
            heads, hidden = (
                cache[f"{name}.attention.heads"].detach(),
                cache[f"{name}.mlp.hidden"].detach(),
            )
            before, after = (
                cache[inputs[layer]].detach().float(),
                cache[name].detach().float(),
            )  # (B, T, C)
            if by_gradient:  # a sum over the positions of a sequence, then the absolute value
                by_head = (heads * gradients[f"{name}.attention.heads"]).sum(dim=(2, 3))  # (B, H)
                by_group = (
                    by_head.unflatten(1, (len(groups[layer]), -1)).sum(dim=2).abs().sum(dim=0)
                )
                by_neuron = (hidden * gradients[f"{name}.mlp.hidden"]).sum(dim=1).abs().sum(dim=0)
                layers[layer] += (
                    ((after - before) * gradients[name]).sum(dim=(1, 2)).abs().sum().cpu()
                )
            else:
                norms = block.attention.o_proj.weight.detach().norm(dim=0)  # (H · D,)
                sizes = heads.abs().sum(dim=(0, 2)).flatten() * norms  # (H · D,)
                by_group = sizes.view(len(groups[layer]), -1).sum(dim=1)
                by_neuron = hidden.abs().sum(dim=(0, 1)) * block.mlp.down_proj.weight.detach().norm(
                    dim=0
                )
                layers[layer] += (1 - torch.cosine_similarity(before, after, dim=-1)).sum().cpu()
            groups[layer] += by_group.float().cpu()
            neurons[layer] += by_neuron.float().cpu()
    return Scores(groups, neurons, layers)
