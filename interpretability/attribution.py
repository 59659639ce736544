"""What a prediction is made of: of which tokens, which heads, which layers.

A prediction y is the logit of token `target` at one position, minus that of `contrast_token` if one is given.
Prompts are (T,) token ids; a position below 0 counts from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.model import Thinker
from thinker.runtime.errors import UserError


def prediction(logits: Tensor, target: int, contrast_token: int | None = None, position: int = -1) -> Tensor:
    """y of each text: logits (B, T, V) -> (B,)."""
    at = logits[:, position].float()  # (B, V)
    return at[:, target] if contrast_token is None else at[:, target] - at[:, contrast_token]


def predict(model: Thinker, target: int, contrast_token: int | None, position: int, **given: Tensor) -> Tensor:
    """y of each text, (B,), with the logits of one position alone: of `tokens` (B, T) or `embeddings` (B, T, C)."""
    with model.patch({"norm": lambda x: x[:, [position]]}):
        return prediction(model(**given), target, contrast_token)


def gradient_times_attention(
    model: Thinker, tokens: Tensor, target: int, contrast_token: int | None = None, position: int = -1
) -> Tensor:
    """S = A ⊙ ∂y/∂A, signed: what y gains, to first order, by each query's look at each key; (layers, H, T, T).

    As in Hao et al. 2021 (arXiv:2004.11207), at the weights themselves instead of along a path to them.
    """
    names = "blocks.*.attention.weights"
    free = {"embedding": lambda x: x.detach().requires_grad_()}  # whatever weights are frozen
    with torch.enable_grad(), model.patch({names: lambda x: x, **free}), model.record(names) as seen:
        y = prediction(model(tokens[None]), target, contrast_token, position).sum()
        weights = list(seen.values())  # (1, H, T, T) each
        gradients = torch.autograd.grad(y, weights)
    each = [(A * g)[0].detach() for A, g in zip(weights, gradients)]
    return pad_sequence(each, batch_first=True, padding_value=torch.nan)


def integrated_gradients(
    model: Thinker,
    tokens: Tensor,
    target: int,
    contrast_token: int | None = None,
    position: int = -1,
    baseline: int | Tensor | None = None,
    tolerance: float = 1e-3,
) -> tuple[Tensor, float, float]:
    """(x − x′) · ∫₀¹ ∂y/∂x (x′ + α (x − x′)) dα on embeddings x, summed over their width (Sundararajan et al. 2017).

    By Gauss–Legendre quadrature (arXiv:1703.01365 has it by equal steps), with 32 points or as many more, up to 512, as
    it takes. Complete: the sum is y(x) − y(x′), but for the quadrature's error.

    Args:
        baseline: x′, a token at every position, or an embedding (C,) or (T, C); the mean of all tokens' unless given.
            Not zero: what a pre-norm model computes hardly depends on the length of x, until at 10⁻⁵ of it everything
            changes at once, and the gradients of that say nothing of x.
        tolerance: what the sum may miss, of y(x) − y(x′) or of 1.

    Returns: what each token gives, (T,); y(x′); by how much the sum misses y(x) − y(x′).
    """
    with torch.no_grad():
        x = model.embedding(tokens)  # (T, C)
        if isinstance(baseline, int):
            baseline = model.embedding(torch.tensor(baseline, device=x.device))
        empty = (model.embedding.weight.mean(dim=0) if baseline is None else baseline.to(x)).expand_as(x)
        ends = [predict(model, target, contrast_token, position, embeddings=end[None]).item() for end in (x, empty)]
    rows, points = max(1, 2**13 // len(tokens)), 32
    while True:
        nodes, shares = (torch.from_numpy(part).to(x.device) for part in np.polynomial.legendre.leggauss(points))
        total = torch.zeros_like(x, dtype=torch.float64)
        for some, share in zip(((nodes + 1) / 2).split(rows), (shares / 2).split(rows)):
            with torch.enable_grad():
                inputs = (empty + some[:, None, None].to(x.dtype) * (x - empty)).requires_grad_()  # (rows, T, C)
                y = predict(model, target, contrast_token, position, embeddings=inputs).sum()
                (gradient,) = torch.autograd.grad(y, inputs)
            total += torch.einsum("r,rtc->tc", share, gradient.double())
        given = (total * (x - empty).double()).sum(dim=-1)  # (T,)
        missed = given.sum().item() - (ends[0] - ends[1])
        if abs(missed) <= tolerance * max(1.0, abs(ends[0] - ends[1])) or points >= 512:
            return given.float(), ends[1], missed
        points *= 2


@dataclass(frozen=True)
class Parts:
    """What each part of the model adds to y: (layers, H) of heads, (layers,) of MLPs, the embedding. The sum is y."""

    embedding: float
    heads: Tensor
    mlps: Tensor
    y: float

    def sum(self) -> float:
        """All of them."""
        return self.embedding + self.heads.nansum().item() + self.mlps.sum().item()


@torch.no_grad()
def direct_logit_attribution(
    model: Thinker, tokens: Tensor, target: int, contrast_token: int | None = None, position: int = -1
) -> Parts:
    """((c ⊙ γ) / rms(x_L)) · (W_U[target] − W_U[contrast_token]) for each component c of x_L = Σ c, at one position.

    Exact, since RMSNorm divides all components by the same number (Elhage et al. 2021, "A Mathematical Framework for
    Transformer Circuits", without its approximation of the norm).
    """
    with model.record(
        "embedding", "blocks.*.attention.heads", "blocks.*.mlp", f"blocks.{len(model.blocks) - 1}"
    ) as seen:
        y = prediction(model(tokens[None]), target, contrast_token, position).item()
    x = seen[f"blocks.{len(model.blocks) - 1}"][0, position].double()  # (C,)
    unembed = model.lm_head.weight.double()
    direction = unembed[target] - (unembed[contrast_token] if contrast_token is not None else 0)  # (C,)
    norm = model.norm
    direction = direction * norm.weight.double() / (x.square().mean() + norm.eps).sqrt()
    heads, mlps = [], []
    for layer, block in enumerate(model.blocks):
        z = seen[f"blocks.{layer}.attention.heads"][0, :, position].double()  # (H, D)
        out = block.attention.o_proj.weight.double().unflatten(1, z.shape)  # (C, H, D)
        heads.append(torch.einsum("hd,chd,c->h", z, out, direction))
        mlps.append(seen[f"blocks.{layer}.mlp"][0, position].double() @ direction)
    embedding = seen["embedding"][0, position].double() @ direction
    each = pad_sequence(heads, batch_first=True, padding_value=torch.nan)  # (layers, H)
    return Parts(embedding.item(), each.float(), torch.stack(mlps).float(), y)


@torch.no_grad()
def logit_lens(model: Thinker, tokens: Tensor, position: int | slice = slice(None)) -> Tensor:
    """W_U · norm_final(x_l): what the model would say after each layer, (layers + 1, positions, V); 0 is the embedding.

    nostalgebraist 2020. The last layer's are the logits. `position`: an index or a slice, all unless given.
    """
    with model.record("embedding", "blocks.*") as seen:
        model(tokens[None])
    at = slice(position, position + 1 or None) if isinstance(position, int) else position
    return torch.stack([model.lm_head(model.norm(x[0, at])) for x in seen.values()]).float()


@torch.no_grad()
def patch(
    model: Thinker,
    clean: Tensor,
    corrupt: Tensor,
    target: int,
    contrast_token: int | None = None,
    names: Sequence[str] = ("embedding", "blocks.*"),
    position: int = -1,
) -> dict[str, Tensor]:
    """Activation patching (Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255).

    The corrupt prompt is read once for each name and position, with what the clean one had there in its place.

    Returns: {name: (T,)}, (y(patched) − y(corrupt)) / (y(clean) − y(corrupt)): 0 where it changes nothing, 1 where it
        brings all of y back.

    Raises UserError where the prompts differ in length, or y is the same for both.
    """
    if clean.shape != corrupt.shape:
        raise UserError(f"the prompts must have as many tokens: {len(clean)} and {len(corrupt)}")
    with model.record(*names) as seen:
        best = predict(model, target, contrast_token, position, tokens=clean[None]).item()
    worst = predict(model, target, contrast_token, position, tokens=corrupt[None]).item()
    if best == worst:
        raise UserError("the prediction is the same for both prompts: there is nothing to bring back")
    T, found = len(clean), {}
    for name, kept in seen.items():
        if kept.dim() != 3:
            raise UserError(f"{name} cannot be patched by position; take the residual stream, an output or one head")
        parts = []
        for places in torch.arange(T, device=corrupt.device).split(max(1, 2**13 // T)):

            def put(x: Tensor, kept: Tensor = kept, places: Tensor = places) -> Tensor:
                x = x.clone()  # (rows, T, ...): the corrupt prompt, each to be mended at one place
                x[torch.arange(len(places)), places] = kept[0, places]
                return x

            with model.patch({name: put}):
                parts.append(predict(model, target, contrast_token, position, tokens=corrupt.expand(len(places), T)))
        found[name] = (torch.cat(parts) - worst) / (best - worst)  # (T,)
    return found
