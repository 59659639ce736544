"""Attribution of a prediction to tokens, heads and layers.

A prediction is the logit of token `target` at one position, minus that of `contrast_token`, if any.
Prompts are (T,) token ids. Negative positions count from the end.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from thinker.model import Thinker
from thinker.model.layers import LayerNorm, OnePlusRMSNorm, RMSNorm, Scale
from thinker.runtime.errors import UserError

MAX_QUADRATURE_POINTS = 512
TOKENS_PER_BATCH = 2**13


def logit_difference(
    logits: Tensor, target: int, contrast_token: int | None = None, position: int = -1
) -> Tensor:
    """Compute the prediction of each text: logits (B, T, V) -> (B,)."""
    at_position = logits[:, position].float()  # (B, V)
    if contrast_token is None:
        return at_position[:, target]
    return at_position[:, target] - at_position[:, contrast_token]


def predict_logit(
    model: Thinker, target: int, contrast_token: int | None, position: int, **inputs: Tensor
) -> Tensor:
    """Predict at one position only, (B,). `inputs`: tokens= (B, T) or embeddings= (B, T, C)."""
    # The final norm and the output matrix, which is large, then see a single position.
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
    """S = A ⊙ ∂y/∂A, the signed first-order contribution of each attention weight to y.

    (layers, H, T, T). As in Hao et al. 2021 (arXiv:2004.11207), but at the weights instead of along
    a path to them.
    """
    names = "blocks.*.attention.weights"
    # This patch changes nothing, but the output then comes from the recorded weights, which need a
    # gradient; otherwise a fused kernel may compute it.
    patches = {names: lambda x: x, "embedding": require_grad_from_embedding}
    with torch.enable_grad(), model.patch(patches), model.record(names) as cache:
        y = logit_difference(model(tokens[None]), target, contrast_token, position).sum()
        weights = list(cache.values())  # (1, H, T, T) each
        gradients = torch.autograd.grad(y, weights)
    products = [(A * g)[0].detach() for A, g in zip(weights, gradients)]
    # Layers may have different numbers of heads after pruning.
    return pad_sequence(products, batch_first=True, padding_value=torch.nan)


def integrated_gradients(
    model: Thinker,
    tokens: Tensor,
    target: int,
    contrast_token: int | None = None,
    position: int = -1,
    baseline: int | Tensor | None = None,
    tolerance: float = 1e-3,
) -> tuple[Tensor, float, float]:
    """(x − x′) · ∫₀¹ ∂y/∂x (x′ + α (x − x′)) dα on embeddings x, summed over their width.

    By Sundararajan et al. 2017. Uses Gauss–Legendre quadrature (arXiv:1703.01365 uses equal steps)
    with 32 points, doubled up to 512 until the sum equals y(x) − y(x′) within the tolerance,
    relative to this or to 1.
    baseline: x′, a token at every position, or an embedding (C,) or (T, C); by default the mean
    embedding. Zero is a poor choice: a pre-norm model hardly depends on the scale of x until it is
    about 10⁻⁵.

    Returns the contribution of each token, (T,); y(x′); the error of the sum.
    """
    predict = partial(predict_logit, model, target, contrast_token, position)
    with torch.no_grad():
        x = model.embedding(tokens)  # (T, C)
        start = _baseline_embedding(model, baseline, x).expand_as(x)
        y = predict(embeddings=x[None]).item()
        y_baseline = predict(embeddings=start[None]).item()
    n_points = 32
    while True:
        total = _path_integral(predict, start, x, n_points)  # (T, C)
        by_token = (total * (x - start).double()).sum(dim=-1)  # (T,)
        # The contributions have to add up to the difference between both ends of the path.
        error = by_token.sum().item() - (y - y_baseline)
        is_close = abs(error) <= tolerance * max(1.0, abs(y - y_baseline))
        if is_close or n_points >= MAX_QUADRATURE_POINTS:
            return by_token.float(), y_baseline, error
        n_points *= 2


def _baseline_embedding(model: Thinker, baseline: int | Tensor | None, x: Tensor) -> Tensor:
    """The embedding (C,) or (T, C) that a baseline stands for, on the device of x."""
    if baseline is None:
        return model.embedding.weight.mean(dim=0) * model.config.embedding_scale
    if isinstance(baseline, int):
        baseline = model.embedding(torch.tensor(baseline, device=x.device))
    return baseline.to(x)


def _path_integral(
    predict: Callable[..., Tensor], start: Tensor, end: Tensor, n_points: int
) -> Tensor:
    """∫₀¹ ∂y/∂x (start + α (end − start)) dα, (T, C), by Gauss–Legendre quadrature in float64."""
    nodes, weights = np.polynomial.legendre.leggauss(n_points)  # on [−1, 1]
    alphas = (torch.from_numpy(nodes).to(end.device) + 1) / 2
    shares = torch.from_numpy(weights).to(end.device) / 2
    rows = max(1, TOKENS_PER_BATCH // len(end))
    total = torch.zeros_like(end, dtype=torch.float64)
    for alpha, share in zip(alphas.split(rows), shares.split(rows)):
        with torch.enable_grad():
            steps = alpha[:, None, None].to(end.dtype) * (end - start)  # (rows, T, C)
            inputs = (start + steps).requires_grad_()
            y = predict(embeddings=inputs).sum()
            (gradient,) = torch.autograd.grad(y, inputs)
        total += torch.einsum("r,rtc->tc", share, gradient.double())
    return total


class LogitComponents(NamedTuple):
    """Contributions to a logit (difference)."""

    embedding: float
    heads: Tensor  # (layers, H)
    mlps: Tensor  # (layers,)
    biases: float  # of norms, of attention's outputs and of the LM head
    logit: float  # of the model


class FixedNorm(NamedTuple):
    """What a norm does to a part c of its input, if what it divides by stays as it was:
    factor ⊙ (c − mean(c)), without the mean in an RMSNorm. The norm adds a bias once."""

    factor: Tensor  # (C,)
    bias: Tensor  # (C,)
    subtracts_mean: bool

    def apply(self, part: Tensor) -> Tensor:
        """(..., C) -> (..., C), without the bias."""
        if self.subtracts_mean:
            part = part - part.mean(-1, keepdim=True)
        return part * self.factor


def fix_norm(module: nn.Module, x: Tensor) -> FixedNorm:
    """A norm, factor or Identity, dividing by what it divides x (C,) by. Raises UserError for other
    modules."""
    x = x.double()
    factor = torch.ones_like(x)
    bias = torch.zeros_like(x)
    subtracts_mean = isinstance(module, LayerNorm)
    if isinstance(module, Scale):
        factor = factor * module.factor
    elif isinstance(module, RMSNorm | LayerNorm):
        if subtracts_mean:
            x = x - x.mean()
        if module.weight is not None:
            factor = module.weight.double()
        if isinstance(module, OnePlusRMSNorm):
            factor = 1 + factor
        factor = factor * (x.square().mean() + module.eps).rsqrt()
        if getattr(module, "bias", None) is not None:
            bias = module.bias.double()
    elif not isinstance(module, nn.Identity):
        raise UserError(
            f"direct logit attribution does not know {type(module).__name__}; use integrated "
            f"gradients"
        )
    return FixedNorm(factor, bias, subtracts_mean)


def _unembedding(model: Thinker, x: Tensor, token: int) -> tuple[Tensor, float]:
    """The direction (C,) whose dot product with x (C,), the input of the LM head, is the logit of a
    token without its bias, and the bias.

    A soft cap multiplies both by the factor by which it shrinks the logit.
    """
    head = model.lm_head
    direction = head.effective_weight()[token].double()
    bias = 0.0
    if head.bias is not None:
        bias = head.bias[token].item()
    transform = model.logit_transform
    if transform is not None:
        logit = direction @ x + bias
        factor = transform.scale
        if logit != 0:
            factor = (transform(logit) / logit).item()
        direction = direction * factor
        bias *= factor
    return direction, bias


@torch.no_grad()
def direct_logit_attribution(
    model: Thinker,
    tokens: Tensor,
    target: int,
    contrast_token: int | None = None,
    position: int = -1,
) -> LogitComponents:
    """((c ⊙ γ) / rms(x_L)) · (W_U[target] − W_U[contrast_token]) for each c of x_L = Σ c.

    c: a component of the residual stream at one position. Exact, since a norm divides all
    components by the same number (Elhage et al. 2021, without an approximate norm). The same holds
    for norms of the outputs of attention and MLP. Raises UserError for norms that are not
    Thinker's.
    """
    last = f"blocks.{len(model.blocks) - 1}"
    names = ("embedding", "blocks.*.attention.heads", "blocks.*.attention", "blocks.*.mlp", last)
    with model.record(*names) as cache:
        logit = logit_difference(model(tokens[None]), target, contrast_token, position).item()
    last_norm = fix_norm(model.norm, cache[last][0, position])
    x = last_norm.apply(cache[last][0, position].double()) + last_norm.bias  # (C,)
    direction, biases = _unembedding(model, x, target)
    if contrast_token is not None:
        contrast, bias = _unembedding(model, x, contrast_token)
        direction = direction - contrast
        biases -= bias
    biases += (last_norm.bias @ direction).item()

    def contribution(part: Tensor) -> Tensor:
        """Of a part (..., C) of the residual stream: (...)."""
        return last_norm.apply(part) @ direction

    heads = []
    mlps = []
    for layer, block in enumerate(model.blocks):
        z = cache[f"blocks.{layer}.attention.heads"][0, :, position].double()  # (H, D)
        o_proj = block.attention.o_proj
        matrix = o_proj.effective_weight().double().unflatten(1, z.shape)  # (C, H, D)
        out = fix_norm(block.after_attention, cache[f"blocks.{layer}.attention"][0, position])
        results = torch.einsum("hd,chd->hc", z, matrix)
        heads.append(contribution(out.apply(results)))
        bias = out.bias
        if o_proj.bias is not None:
            bias = bias + out.apply(o_proj.bias.double())
        biases += contribution(bias).item()
        mlp = cache[f"blocks.{layer}.mlp"][0, position]
        mlps.append(contribution(block.after_mlp(mlp).double()))
    embedding = contribution(cache["embedding"][0, position].double()).item()
    by_head = pad_sequence(heads, batch_first=True, padding_value=torch.nan)  # (layers, H)
    return LogitComponents(embedding, by_head.float(), torch.stack(mlps).float(), biases, logit)


@torch.no_grad()
def logit_lens(model: Thinker, tokens: Tensor, position: int | slice = slice(None)) -> Tensor:
    """W_U · norm_final(x_l): the logits if the model ended after a layer.

    (layers + 1, positions, V). From nostalgebraist 2020. Index 0 is the embedding, the last index
    the model's logits. `position`: index or slice.
    """
    with model.record("embedding", "blocks.*") as cache:
        model(tokens[None])
    positions = position
    if isinstance(position, int):
        # A slice keeps the dimension. After the last position, −1, comes no 0.
        end = None if position == -1 else position + 1
        positions = slice(position, end)
    logits = []
    for x in cache.values():
        logits.append(model.lm_head(model.norm(x[0, positions])))
    return torch.stack(logits).float()


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
    """Activation patching: what each activation of the clean prompt restores of its prediction.

    Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255.
    Runs the corrupt prompt once per name and position, with this activation taken from the clean
    prompt. Returns the restored share, {name: (T,)}:
    (y(patched) − y(corrupt)) / (y(clean) − y(corrupt)).
    Raises UserError if the prompts differ in length, y is equal for both, or an activation has no
    positions.
    """
    if clean.shape != corrupt.shape:
        problem = f"the prompts have {len(clean)} and {len(corrupt)} tokens"
        raise UserError(f"{problem}; use prompts of equal length")
    if torch.equal(clean, corrupt):
        problem = "both prompts have the same tokens"
        raise UserError(f"{problem}; change the corrupt prompt where it affects the prediction")
    predict = partial(predict_logit, model, target, contrast_token, position)
    with model.record(*names) as cache:
        y_clean = predict(tokens=clean[None]).item()
    y_corrupt = predict(tokens=corrupt[None]).item()
    difference = y_clean - y_corrupt
    if abs(difference) <= 1e-5 * max(1.0, abs(y_clean)):  # shares would be rounding errors
        problem = f"the target's logit is {y_clean:.4f} in both prompts"
        raise UserError(f"{problem}; use other prompts or another target")

    T = len(clean)
    # Each row is the corrupt prompt, patched at one position (where the identity matrix is True).
    positions = torch.eye(T, dtype=torch.bool, device=corrupt.device)
    rows_per_batch = max(1, TOKENS_PER_BATCH // T)
    restored = {}
    for name, activation in cache.items():
        if activation.dim() != 3 or activation.shape[1] != T:
            problem = f"{name} cannot be patched by position"
            raise UserError(f"{problem}; use the residual stream, a layer output or a head")
        predictions = []
        for rows in positions.split(rows_per_batch):
            with model.patch({name: partial(torch.where, rows[..., None], activation)}):
                predictions.append(predict(tokens=corrupt.expand(len(rows), T)))
        restored[name] = (torch.cat(predictions) - y_corrupt) / difference  # (T,)
    return restored
