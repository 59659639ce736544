"""One attention row step by step: of a head of a model, or of vectors in a JSON file."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.interpretability.reports import (
    ATTENTION_AXES,
    Panel,
    Prompt,
    Report,
    decimal,
    numbered,
)
from thinker.model import Thinker
from thinker.model.attention import LinearAttention
from thinker.model.config import BIASES
from thinker.model.patterns.pattern import TokenInfo
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json

MAX_KEYS = 2048  # in a file; plots show all pairs
FILE_KEYS = ("q", "k", "v", "tokens", "causal")


@dataclass(frozen=True)
class HeadScores:
    """Intermediate values of one head for S keys and T queries, which are at the last T positions.

    (T, S) each unless noted.
    """

    labels: list[str]  # of the S positions
    divisor: str  # such as √64, or 2√64 with a temperature of 2
    raw: Tensor  # QKᵀ
    scaled: Tensor  # ÷ divisor
    capped: Tensor  # equals `scaled` without a cap
    bias: Tensor  # 0 where masked
    visible: Tensor  # bool
    weights: Tensor
    values: Tensor  # (S, D)
    output: Tensor  # (T, D), output of the head
    sink: float | None = None  # score of the attention sink
    has_cap: bool = False
    has_bias: bool = False


@torch.no_grad()
def explain(model: Thinker, prompt: Prompt, layer: int, head: int, query: int) -> Report:
    """Explain one attention row step by step (Vaswani et al. 2017, eq. 1).

    Raises UserError for linear attention.
    """
    attention = model.blocks[layer].attention
    if isinstance(attention, LinearAttention):
        problem = f"layer {layer} uses linear attention, which has no scores"
        raise UserError(f"{problem}; use another --layer")
    query %= len(prompt.tokens)
    path = f"blocks.{layer}.attention"
    names = [f"{path}.{part}" for part in ("q", "k", "v", "weights", "heads")]
    with model.record(*names) as cache:
        model(prompt.tokens[None])
    # In float64, so that the printed digits follow from each other.
    q, k, v, weights, z = (cache[name][0].double().cpu() for name in names)

    # The same steps as in the model, by hand.
    kv_head = head // (len(q) // len(k))
    raw = q[head] @ k[kv_head].T  # (T, T)
    scaled = raw * attention.scale
    cap = model.config.attn_logit_softcap
    capped = scaled
    if cap is not None:
        capped = cap * torch.tanh(scaled / cap)
    bias, visible = _bias_and_mask(model, prompt.tokens, layer, head, capped, q, k)

    divisor = f"√{q.shape[-1]}"
    temperature = model.config.attention_temperature
    if temperature != 1:
        divisor = f"{temperature:g}{divisor}"
    if model.config.attention_scale is not None:
        divisor = f"{1 / attention.scale:g}"
    sink = None
    if attention.sinks is not None:
        sink = attention.sinks[head].item()
    found = HeadScores(
        labels=prompt.labels,
        divisor=divisor,
        raw=raw,
        scaled=scaled,
        capped=capped,
        bias=bias,
        visible=visible,
        weights=weights[head],
        values=v[kv_head],
        output=z[head],
        sink=sink,
        has_cap=cap is not None,
        has_bias=model.config.positions in BIASES,
    )
    data = {"layer": layer, "head": head, "q": q[head, query].tolist()}
    name = str(head)
    if len(q) > len(k):  # several heads share keys and values
        name = f"{head} (KV head {kv_head})"
    return _report_row(found, query, {"layer": layer, "head": name}, data)


def _bias_and_mask(
    model: Thinker, tokens: Tensor, layer: int, head: int, scores: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """The bias of one head (0 where masked) and its visible keys: scores (T, T) -> (T, T) each."""
    T = len(tokens)
    builder = model.mask_builder
    position = torch.arange(T, device=model.device)
    token_id = tokens if builder.by_token else None
    info = TokenInfo(position, token_id=token_id)
    mask_form = builder.reference_mask(builder.patterns[layer], info)
    bias = torch.zeros(())
    visible = mask_form.allowed
    if visible is not None and visible.dtype != torch.bool:  # ALiBi's biases, -inf where masked
        bias = visible.cpu()
        visible = bias > -torch.inf
    shape = 1, model.blocks[layer].attention.n_heads, T, T
    # Masks and biases that all heads share have a single head.
    bias = bias.expand(shape)[0, head]
    if mask_form.content_mask is not None:  # which depends on the scores or the vectors
        inputs = q[None], k[None], (scores + bias)[None, None]
        visible = mask_form.content_mask(*(x.float().to(model.device) for x in inputs))
    visible = visible.cpu().expand(shape)[0, head]
    return bias.double().masked_fill(~visible, 0), visible


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UserError unless `explain` has a model and a prompt, or a JSON file and no prompt."""
    path = arguments.model
    is_vector_file = path.endswith(".json") and not Path(path).is_dir()
    if (arguments.prompt is None) != is_vector_file:
        raise UserError(
            "explain needs a model with --prompt TEXT, or a JSON file (q, k, v) without --prompt"
        )
    choice = arguments.layer, arguments.head, arguments.checkpoint
    if is_vector_file and choice != (0, 0, "latest"):
        flags = "--layer, --head and --checkpoint"
        raise UserError(f"{flags} have no effect with {path}; remove them")


def explain_vectors(path: Path, query: int) -> Report:
    """Explain attention over vectors in a JSON file, for one query.

    The file: {"q": [[...], ...], "k": ..., "v": ...}. Optional keys: "tokens" (a label per key),
    "causal" (default: true). Queries belong to the last positions. Raises UserError.
    """
    content = read_json(path)
    unknown = content.keys() - set(FILE_KEYS)
    if unknown:
        available = ", ".join(FILE_KEYS)
        raise UserError(f"{path} has the unknown key {min(unknown)!r} (available: {available})")
    q, k, v = (_matrix(path, name, content.get(name)) for name in ("q", "k", "v"))
    _check_shapes(path, q, k, v)
    T = len(q)
    S = len(k)
    if not -T <= query < T:
        raise UserError(f"--query is {query}; {path} has {T} queries (use {-T} to {T - 1})")
    labels = _labels(path, content, S)
    causal = content.get("causal", True)
    if not isinstance(causal, bool):
        raise UserError(f"{path}: causal is {causal!r}; use true or false")

    raw = q @ k.T  # (T, S)
    scaled = raw * q.shape[1] ** -0.5
    visible = torch.ones(T, S, dtype=torch.bool)
    if causal:
        visible = visible.tril(S - T)
    weights = scaled.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if not raw.isfinite().all():  # finite vectors may have infinite products
        raise UserError(f"{path}: q·k overflows; use smaller vectors")
    head = HeadScores(
        labels=labels,
        divisor=f"√{q.shape[1]}",
        raw=raw,
        scaled=scaled,
        capped=scaled,
        bias=torch.zeros(T, S).double(),
        visible=visible,
        weights=weights,
        values=v,
        output=weights @ v,
    )
    return _report_row(head, query % T, {"vectors": str(path)}, {"q": q[query].tolist()})


def _check_shapes(path: Path, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[1] == k.shape[1] and len(v) == len(k) and len(q) <= len(k):
        return
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    wanted = "q and k need equal widths, k and v equal numbers of rows, and q at most as many rows"
    raise UserError(f"{path}: the shapes are {shapes}; {wanted}")


def _labels(path: Path, content: dict[str, Any], n_keys: int) -> list[str]:
    """The labels of the keys. Raises UserError unless there is one string per key."""
    labels = content.get("tokens", [""] * n_keys)
    is_list = isinstance(labels, list) and len(labels) == n_keys
    if not is_list or not all(isinstance(text, str) for text in labels):
        problem = f"tokens is not a list of {n_keys} strings"
        raise UserError(f"{path}: {problem}; give one string per vector in k")
    return labels


def _matrix(path: Path, name: str, value: Any) -> Tensor:
    """Convert rows of equal length to a float64 tensor. Raises UserError."""
    is_list = isinstance(value, list) and len(value) > 0
    if not is_list or not all(isinstance(row, list) and row for row in value):
        problem = f"{name} is not a list of vectors"
        raise UserError(f"{path}: {problem}; write it as [[1, 0.5], [0, -1]]")
    if len(value) > MAX_KEYS or len(set(map(len, value))) > 1:
        problem = f"{name} has {len(value)} vectors"
        raise UserError(f"{path}: {problem}; use at most {MAX_KEYS}, all of the same length")
    try:
        matrix = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(f"{path}: {name} contains values that are not numbers: {error}") from error
    if matrix.dim() != 2 or not matrix.isfinite().all():
        problem = f"{name} contains infinite or nested values"
        raise UserError(f"{path}: {problem}; use vectors of finite numbers")
    return matrix


def _report_row(
    head: HeadScores, query: int, header: dict[str, Any], data: dict[str, Any]
) -> Report:
    """Report one row of attention (Vaswani et al. 2017, eq. 1) and the matrices that contain it."""
    position = len(head.labels) - len(head.raw) + query
    scores = head.capped + head.bias  # (T, S)
    row = head.weights[query]  # (S,)
    mask = head.visible[query]  # (S,)
    norms = head.values.norm(dim=-1)  # (S,)
    # The softmax by hand, minus the largest score as usual; a sink is one more score.
    logits = scores[query, mask].tolist()
    if head.sink is not None:
        logits.append(head.sink)
    largest = max(logits, default=0.0)
    exponentials = (scores[query] - largest).exp()  # (S,)
    total = exponentials[mask].sum().item()
    sink_share = 0.0
    if head.sink is not None:
        sink_share = math.exp(head.sink - largest)
    # Both are equal, unless the model does something else: a reader can check it.
    output = row @ head.values  # (D,)
    actual = head.output[query]  # (D,)

    footer = f"Σ exp = {total + sink_share:.4f}"
    if head.sink is not None:
        footer += f", of which the sink has {sink_share:.4f}"
    footer += f"; norm of the weighted sum of values: {output.norm():.4f}"
    footer += f", of the head's output: {actual.norm():.4f}"

    steps = {"q·k": head.raw[query], f"÷ {head.divisor}": head.scaled[query]}
    if head.has_cap:
        steps["capped"] = head.capped[query]
    if head.has_bias:
        steps["bias"] = head.bias[query]
    columns = ["key", "token", *steps, "visible"]
    columns += [f"exp(· − {largest:.2f})", "weight", "|v|", "weight·|v|"]
    rows = []
    for key, text in enumerate(head.labels):
        cells = [str(key), text]
        cells += [decimal(values[key], 4) for values in steps.values()]
        if mask[key]:
            cells += ["yes", f"{exponentials[key]:.4f}", f"{row[key]:.4f}"]
        else:
            cells += ["no", "", "0"]
        # A large weight on a small value changes little.
        cells += [f"{norms[key]:.4f}", f"{row[key] * norms[key]:.4f}"]
        rows.append(cells)
    data = data | {
        "query": position,
        "tokens": head.labels,
        "scores": head.raw[query].tolist(),
        "scaled": head.scaled[query].tolist(),
        "capped": head.capped[query].tolist(),
        "sink": head.sink,
        "bias": head.bias[query].tolist(),
        "visible": mask.tolist(),
        "weights": row.tolist(),
        "values": head.values.tolist(),
        "output": output.tolist(),
        "head_output": actual.tolist(),
    }
    header = header | {"query": f"{position} {head.labels[position]}"}
    panels = _panels(head, scores, query)
    return Report(header, columns, rows, data, panels, footer, panels_per_row=2)


def _panels(head: HeadScores, scores: Tensor, query: int) -> list[Panel]:
    """Plot the matrices from raw scores to weighted values."""
    labels = numbered(head.labels)
    queries = labels[len(labels) - len(scores) :]  # the last ones
    hidden = ~head.visible
    added = head.weights * head.values.norm(dim=-1)
    scaled_title = f"scores: QKᵀ ÷ {head.divisor}"
    if head.has_cap or head.has_bias:
        scaled_title += " + …"
    matrices = (  # title, values, whether they have signs
        ("raw scores: QKᵀ", head.raw, True),
        (scaled_title, scores, True),
        ("scores after the mask", scores.masked_fill(hidden, torch.nan), True),
        ("attention weights: softmax", head.weights.masked_fill(hidden, torch.nan), False),
        ("softmax without the mask", scores.softmax(dim=-1), False),
        ("weight · |v|: contribution of each value", added.masked_fill(hidden, torch.nan), False),
    )
    panels = []
    for title, values, signed in matrices:
        panel = Panel(
            title,
            values,
            queries,
            labels,
            signed,
            highlighted_row=query,
            axis_labels=ATTENTION_AXES,
        )
        panels.append(panel)
    return panels
