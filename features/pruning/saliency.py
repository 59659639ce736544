"""Scores of the parts of a model that can be removed: KV groups with their heads, neurons of MLPs,
and layers.

- "gradient": how much the loss would change to first order, |Σ z · ∂L/∂z| summed over the sequences
(Molchanov et al.
  2019, arXiv:1906.10771), where z is what the part computes.
- "activation": mean |z| times the norm of its columns in the output matrix, as in Wanda (Sun et al.
2023,
  arXiv:2306.11695); for a layer, 1 - the cosine of its input and output (Men et al. 2024,
  arXiv:2403.03853).
- "magnitude": the product of the norms of its matrices. "random": for comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.features.pruning.zeros import input_matrices
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
        return _at_random(model, seed)
    if method == "magnitude":
        return _by_magnitude(model)
    return _by_activity(model, tokens, targets, by_gradient=method == "gradient")


def _at_random(model: Thinker, seed: int) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    blocks = model.blocks
    groups = [torch.rand(block.attention.n_kv_heads, generator=generator) for block in blocks]
    widths = [block.mlp.down_proj.in_features for block in blocks]
    neurons = [torch.rand(width, generator=generator) for width in widths]
    return Scores(groups, neurons, torch.rand(len(blocks), generator=generator))


@torch.no_grad()
def _by_magnitude(model: Thinker) -> Scores:
    groups = []
    neurons = []
    layers = []
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        K = attention.n_kv_heads
        norms_by_group = [
            attention.k_proj.weight.view(K, -1).norm(dim=1),
            attention.v_proj.weight.view(K, -1).norm(dim=1),
            attention.q_proj.weight.reshape(K, -1).norm(dim=1),
            attention.o_proj.weight.T.reshape(K, -1).norm(dim=1),  # from (H · D, C)
        ]
        groups.append(torch.stack(norms_by_group).prod(dim=0).cpu())
        of_neuron = mlp.down_proj.weight.norm(dim=0)
        for matrix in input_matrices(block):
            of_neuron = of_neuron * matrix.weight.norm(dim=1)
        neurons.append(of_neuron.cpu())
        layers.append(attention.o_proj.weight.norm() * mlp.down_proj.weight.norm())
    return Scores(groups, neurons, torch.stack(layers).cpu())


def _by_activity(model: Thinker, tokens: Tensor, targets: Tensor, by_gradient: bool) -> Scores:
    """Sum the scores over parts of the sequences, each with all its activations in memory."""
    n_layers = len(model.blocks)
    rows = max(1, BATCH_TOKENS // tokens.shape[1])
    scores = Scores(
        groups=[torch.zeros(block.attention.n_kv_heads) for block in model.blocks],
        neurons=[torch.zeros(block.mlp.down_proj.in_features) for block in model.blocks],
        layers=torch.zeros(n_layers),
    )
    names = ("embedding", "blocks.*", "blocks.*.attention.heads", "blocks.*.mlp.hidden")
    start = {"embedding": lambda x: x.detach().requires_grad_()} if by_gradient else {}
    for part, wanted in zip(tokens.split(rows), targets.split(rows)):
        with torch.set_grad_enabled(by_gradient), model.patch(start), model.record(*names) as cache:
            loss, _ = model(part, targets=wanted)
        if by_gradient:
            gradients = torch.autograd.grad(loss, list(cache.values()))
            _add_by_gradient(scores, cache, dict(zip(cache, gradients)))
        else:
            _add_by_activation(scores, cache, model)
    return scores


def _residual(cache: Mapping[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """The residual stream before and after a layer, (B, T, C) fp32 each."""
    before = "embedding" if layer == 0 else f"blocks.{layer - 1}"
    return cache[before].detach().float(), cache[f"blocks.{layer}"].detach().float()


def _add_by_gradient(
    scores: Scores, cache: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    """Add |Σ z · ∂L/∂z|: a sum over the positions of a sequence, then the absolute value."""
    for layer, (groups, neurons) in enumerate(zip(scores.groups, scores.neurons)):
        name = f"blocks.{layer}"
        heads = cache[f"{name}.attention.heads"].detach()  # (B, H, T, D)
        by_head = (heads * gradients[f"{name}.attention.heads"]).sum(dim=(2, 3))  # (B, H)
        by_group = by_head.unflatten(1, (len(groups), -1)).sum(dim=2).abs().sum(dim=0)
        hidden = cache[f"{name}.mlp.hidden"].detach()  # (B, T, d_ff)
        by_neuron = (hidden * gradients[f"{name}.mlp.hidden"]).sum(dim=1).abs().sum(dim=0)
        before, after = _residual(cache, layer)
        by_layer = ((after - before) * gradients[name]).sum(dim=(1, 2)).abs().sum()
        scores.layers[layer] += by_layer.cpu()
        groups += by_group.float().cpu()
        neurons += by_neuron.float().cpu()


def _add_by_activation(scores: Scores, cache: Mapping[str, Tensor], model: Thinker) -> None:
    """Add |z| times the norm of its columns in the output matrix; for a layer, 1 - cosine."""
    for layer, block in enumerate(model.blocks):
        name, groups = f"blocks.{layer}", scores.groups[layer]
        heads = cache[f"{name}.attention.heads"].detach()  # (B, H, T, D)
        norms = block.attention.o_proj.weight.detach().norm(dim=0)  # (H · D,)
        sizes = heads.abs().sum(dim=(0, 2)).flatten() * norms  # (H · D,)
        by_group = sizes.view(len(groups), -1).sum(dim=1)
        hidden = cache[f"{name}.mlp.hidden"].detach()  # (B, T, d_ff)
        norms = block.mlp.down_proj.weight.detach().norm(dim=0)  # (d_ff,)
        by_neuron = hidden.abs().sum(dim=(0, 1)) * norms
        before, after = _residual(cache, layer)
        by_layer = (1 - torch.cosine_similarity(before, after, dim=-1)).sum()
        scores.layers[layer] += by_layer.cpu()
        groups += by_group.float().cpu()
        scores.neurons[layer] += by_neuron.float().cpu()
