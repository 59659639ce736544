"""Unstructured pruning: scores of single weights, and zeros in place of those with the lowest.

The matrices are those of the blocks. A weight's score is
- "magnitude": |w| (Han et al. 2015, arXiv:1506.02626);
- "activation": |w| times the norm of its input over all positions, as in Wanda (Sun et al. 2023,
arXiv:2306.11695),
  which compares the weights of one output (row) with each other; the other methods compare those of
  a matrix;
- "gradient": |w · ∂L/∂w|, the change of the loss to first order (Molchanov et al. 2019,
arXiv:1906.10771);
- "random": for comparison.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from thinker.features.pruning.saliency import BATCH_TOKENS
from thinker.model import Thinker
from thinker.model.layers import Linear

# What each matrix of a block reads, as named by Thinker.record().
INPUTS = {
    "attention.q_proj": "attention_norm",
    "attention.k_proj": "attention_norm",
    "attention.v_proj": "attention_norm",
    "attention.o_proj": "attention.heads",
    "mlp.gate_proj": "mlp_norm",
    "mlp.up_proj": "mlp_norm",
    "mlp.down_proj": "mlp.hidden",
}


def block_matrices(model: Thinker) -> dict[str, Linear]:
    """The matrices of all blocks, by name."""
    matrices = {}
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear):
            matrices[f"blocks.{name}"] = module
    return matrices


def score_weights(
    model: Thinker, tokens: Tensor, targets: Tensor, method: str, seed: int = 0
) -> dict[str, Tensor]:
    """Score every weight of the blocks on sequences, (N, T) each. Returns fp32 (n_out, n_in) by
    matrix."""
    matrices = block_matrices(model)
    sizes = {name: matrix.weight.detach().float().abs() for name, matrix in matrices.items()}
    if method == "magnitude":
        return sizes
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for name, size in sizes.items():
            factors[name] = torch.rand(size.shape, generator=generator).to(size.device)
        return factors
    if method == "activation":
        factors = _input_norms(model, tokens, targets)
    else:
        assert method == "gradient", method
        gradients = _gradients(model, matrices, tokens, targets)
        factors = {name: gradient.abs() for name, gradient in gradients.items()}
    return {name: size * factors[name] for name, size in sizes.items()}


@torch.no_grad()
def _input_norms(model: Thinker, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The norm over all positions of each input of a matrix, (n_in,) fp32."""
    recorded = sorted({f"blocks.*.{name}" for name in INPUTS.values()})
    squares: dict[str, Tensor] = {}
    rows = max(1, BATCH_TOKENS // tokens.shape[1])
    for part, wanted in zip(tokens.split(rows), targets.split(rows)):
        with model.record(*recorded) as cache:
            model(part, targets=wanted)
        for name, x in cache.items():
            x = x.float().square()
            if x.dim() == 4:  # (B, H, T, D)
                total = x.sum(dim=(0, 2)).flatten()  # (H · D,)
            else:
                total = x.sum(dim=(0, 1))  # (n_in,)
            squares[name] = squares.get(name, 0) + total
    norms = {}
    for layer in range(len(model.blocks)):
        for name, source in INPUTS.items():
            norms[f"blocks.{layer}.{name}"] = squares[f"blocks.{layer}.{source}"].sqrt()
    return norms


def _gradients(
    model: Thinker, matrices: Mapping[str, Linear], tokens: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """The gradient of the summed loss for each matrix."""
    weights = [matrix.weight for matrix in matrices.values()]
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    rows = max(1, BATCH_TOKENS // tokens.shape[1])
    for part, wanted in zip(tokens.split(rows), targets.split(rows)):
        with torch.enable_grad():
            loss, _ = model(part, targets=wanted)
        gradients = [gradient.float() for gradient in torch.autograd.grad(loss, weights)]
        torch._foreach_add_(totals, gradients)
    return dict(zip(matrices, totals))


@torch.no_grad()
def zero_weights(model: Thinker, scores: Mapping[str, Tensor], share: float, by_row: bool) -> None:
    """Set this share of each matrix to zero, of each row with `by_row`: the weights with the lowest
    scores.

    Weights that are zero already count, and come first, so a larger share only adds zeros.
    """
    for name, matrix in block_matrices(model).items():
        weight = matrix.weight
        score = scores[name].masked_fill(weight == 0, -1)
        if not by_row:
            score = score.view(1, -1)
        n = round(share * score.shape[1])
        lowest = score.argsort(dim=1, stable=True)[:, :n]
        is_lowest = torch.zeros_like(score, dtype=torch.bool).scatter_(1, lowest, True)
        weight.masked_fill_(is_lowest.view_as(weight), 0)


def zero_share(model: Thinker) -> float:
    """The share of the weights in the blocks' matrices that are zero."""
    n_zero, n = 0, 0
    for matrix in block_matrices(model).values():
        n_zero += (matrix.weight == 0).sum()
        n += matrix.weight.numel()
    return int(n_zero) / n
