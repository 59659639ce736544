"""Attribution of a prediction to tokens, heads and layers.

A prediction is the logit of token `target` at one position, minus that of `contrast_token`, if any.
Prompts are (T,) token ids. Negative positions count from the end.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.model import Thinker
from thinker.runtime.errors import UserError

MAX_QUADRATURE_POINTS = 512
TOKENS_PER_BATCH = 2**13


def logit_difference(
    logits: Tensor, target: int, contrast_token: int | None = None, position: int = -1
) -> Tensor:
    """Compute the prediction of each text: logits (B, T, V) -> (B,)."""
    at_position = logits[:, position].float()  # (B, V)
    return at_position[:, target] - (
        0 if contrast_token is None else at_position[:, contrast_token]
    )


def predict_logit(
    model: Thinker, target: int, contrast_token: int | None, position: int, **inputs: Tensor
) -> Tensor:
    """Predict at one position only, (B,). `inputs`: tokens= (B, T) or embeddings= (B, T, C)."""
    with model.patch({"norm": lambda x: x[:, [position]]}):
        return logit_difference(model(**inputs), target, contrast_token)


def require_grad_from_embedding(x: Tensor) -> Tensor:
    """Patch "embedding" so that later activations are differentiable even with frozen weights."""
    return x.detach().requires_grad_()


def gradient_times_attention(
    model: Thinker,
    tokens: Tensor,
    target: int,
    contrast_token: int | None = None,
    position: int = -1,
) -> Tensor:
    """S = A ⊙ ∂y/∂A, the signed first-order contribution of each attention weight to y; (layers, H, T, T).

    As in Hao et al. 2021 (arXiv:2004.11207), but at the weights instead of along a path to them.
    """
    names = "blocks.*.attention.weights"
    patches = {names: lambda x: x, "embedding": require_grad_from_embedding}
    with torch.enable_grad(), model.patch(patches), model.record(names) as cache:
        y = logit_difference(model(tokens[None]), target, contrast_token, position).sum()
        weights = list(cache.values())  # (1, H, T, T) each
        gradients = torch.autograd.grad(y, weights)
    products = [(A * g)[0].detach() for A, g in zip(weights, gradients)]
    return pad_sequence(products, batch_first=True, padding_value=torch.nan)


def integrated_gradients(
    model: Thinker, tokens: Tensor, target: int, contrast_token: int | None = None, position: int = -1,
    baseline: int | Tensor | None = None, tolerance: float = 1e-3,
) -> tuple[Tensor, float, float]:  # fmt: skip
    """(x − x′) · ∫₀¹ ∂y/∂x (x′ + α (x − x′)) dα on embeddings x, summed over their width (Sundararajan et al. 2017).

    Uses Gauss–Legendre quadrature (arXiv:1703.01365 uses equal steps) with 32 points, doubled up to 512 until the sum
    equals y(x) − y(x′) within the tolerance, relative to this or to 1.
    baseline: x′, a token at every position, or an embedding (C,) or (T, C); by default the mean embedding. Zero is a
    poor choice: a pre-norm model hardly depends on the scale of x until it is about 10⁻⁵.

    Returns the contribution of each token, (T,); y(x′); the error of the sum.
    """
    prediction = target, contrast_token, position
    with torch.no_grad():
        x = model.embedding(tokens)  # (T, C)
        if isinstance(baseline, int):
            baseline = model.embedding(torch.tensor(baseline, device=x.device))
        start = (
            model.embedding.weight.mean(dim=0) if baseline is None else baseline.to(x)
        ).expand_as(x)
        y, y_baseline = (
            predict_logit(model, *prediction, embeddings=end[None]).item() for end in (x, start)
        )
    rows, n_points = max(1, TOKENS_PER_BATCH // len(tokens)), 32
    while True:
        nodes, weights = (
            torch.from_numpy(part).to(x.device)
            for part in np.polynomial.legendre.leggauss(n_points)
        )
        total = torch.zeros_like(x, dtype=torch.float64)
        for alpha, weight in zip(((nodes + 1) / 2).split(rows), (weights / 2).split(rows)):
            with torch.enable_grad():
                inputs = (
                    start + alpha[:, None, None].to(x.dtype) * (x - start)
                ).requires_grad_()  # (rows, T, C)
                (gradient,) = torch.autograd.grad(
                    predict_logit(model, *prediction, embeddings=inputs).sum(), inputs
                )
            total += torch.einsum("r,rtc->tc", weight, gradient.double())
        by_token = (total * (x - start).double()).sum(dim=-1)  # (T,)
        error = by_token.sum().item() - (y - y_baseline)
        if (
            abs(error) <= tolerance * max(1.0, abs(y - y_baseline))
            or n_points >= MAX_QUADRATURE_POINTS
        ):
            return by_token.float(), y_baseline, error
        n_points *= 2


class LogitComponents(NamedTuple):
    """Contributions to a logit (difference): heads (layers, H), MLPs (layers,) and the embedding."""

    embedding: float
    heads: Tensor
    mlps: Tensor
    logit: float


@torch.no_grad()
def direct_logit_attribution(
    model: Thinker,
    tokens: Tensor,
    target: int,
    contrast_token: int | None = None,
    position: int = -1,
) -> LogitComponents:
    """((c ⊙ γ) / rms(x_L)) · (W_U[target] − W_U[contrast_token]) for each component c of x_L = Σ c, at one position.

    Exact, since RMSNorm divides all components by the same number (Elhage et al. 2021, without an approximate norm).
    """
    last = f"blocks.{len(model.blocks) - 1}"
    with model.record("embedding", "blocks.*.attention.heads", "blocks.*.mlp", last) as cache:
        logit = logit_difference(model(tokens[None]), target, contrast_token, position).item()
    x, norm = cache[last][0, position].double(), model.norm  # (C,)
    unembed = model.lm_head.weight.double()
    direction = unembed[target] - (
        unembed[contrast_token] if contrast_token is not None else 0
    )  # (C,)
    direction = direction * norm.weight.double() / (x.square().mean() + norm.eps).sqrt()
    heads, mlps = [], []
    for layer, block in enumerate(model.blocks):
        z = cache[f"blocks.{layer}.attention.heads"][0, :, position].double()  # (H, D)
        out = block.attention.o_proj.weight.double().unflatten(1, z.shape)  # (C, H, D)
        heads.append(torch.einsum("hd,chd,c->h", z, out, direction))
        mlps.append(cache[f"blocks.{layer}.mlp"][0, position].double() @ direction)
    embedding = cache["embedding"][0, position].double() @ direction
    by_head = pad_sequence(heads, batch_first=True, padding_value=torch.nan)  # (layers, H)
    return LogitComponents(embedding.item(), by_head.float(), torch.stack(mlps).float(), logit)


@torch.no_grad()
def logit_lens(model: Thinker, tokens: Tensor, position: int | slice = slice(None)) -> Tensor:
    """W_U · norm_final(x_l): the logits if the model ended after a layer, (layers + 1, positions, V).

    From nostalgebraist 2020. Index 0 is the embedding, the last index the model's logits. `position`: index or slice.
    """
    with model.record("embedding", "blocks.*") as cache:
        model(tokens[None])
    positions = slice(position, position + 1 or None) if isinstance(position, int) else position
    return torch.stack([model.lm_head(model.norm(x[0, positions])) for x in cache.values()]).float()


@torch.no_grad()
def patch(
    model: Thinker, clean: Tensor, corrupt: Tensor, target: int, contrast_token: int | None = None,
    names: Sequence[str] = ("embedding", "blocks.*"), position: int = -1,
) -> dict[str, Tensor]:  # fmt: skip
    """Activation patching (Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255).

    Runs the corrupt prompt once per name and position, with this activation taken from the clean prompt. Returns the
    restored share, {name: (T,)}: (y(patched) − y(corrupt)) / (y(clean) − y(corrupt)).
    Raises UserError if the prompts differ in length, y is equal for both, or an activation has no positions.
    """
    if clean.shape != corrupt.shape:
        raise UserError(
            f"the prompts have {len(clean)} and {len(corrupt)} tokens; use prompts of equal length"
        )
    if torch.equal(clean, corrupt):
        raise UserError(
            "both prompts have the same tokens; change the corrupt prompt where it affects the prediction"
        )
    predict = partial(predict_logit, model, target, contrast_token, position)
    with model.record(*names) as cache:
        y_clean = predict(tokens=clean[None]).item()
    y_corrupt = predict(tokens=corrupt[None]).item()
    if abs(y_clean - y_corrupt) <= 1e-5 * max(
        1.0, abs(y_clean)
    ):  # otherwise shares would be rounding errors
        raise UserError(
            f"the target's logit is {y_clean:.4f} in both prompts; use other prompts or another target"
        )
    T, restored = len(clean), {}
    for name, activation in cache.items():
        if activation.dim() != 3 or activation.shape[1] != T:
            raise UserError(
                f"{name} cannot be patched by position; use the residual stream, a layer output or a head"
            )
        predictions = []
        # Each row is the corrupt prompt, patched at one position (where the identity matrix is True).
        for rows in torch.eye(T, dtype=torch.bool, device=corrupt.device).split(
            max(1, TOKENS_PER_BATCH // T)
        ):
            with model.patch({name: partial(torch.where, rows[..., None], activation)}):
                predictions.append(predict(tokens=corrupt.expand(len(rows), T)))
        restored[name] = (torch.cat(predictions) - y_corrupt) / (y_clean - y_corrupt)  # (T,)
    return restored
