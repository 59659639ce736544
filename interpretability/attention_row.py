"""Report on one attention row, of a head or of vectors in a JSON file."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.interpretability.reports import ATTENTION_AXES, Panel, Report, decimal
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json

MAX_KEYS = 2048  # in a file; plots show all pairs


@dataclass(frozen=True)
class HeadScores:
    """Intermediate values of one head for S keys and T queries, at the last T positions; (T, S) each unless noted."""

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


def report_attention_row(
    head: HeadScores, query: int, header: dict[str, Any], data: dict[str, Any]
) -> Report:
    """Report one row of attention (Vaswani et al. 2017, eq. 1) and the matrices that contain it."""
    position = len(head.labels) - len(head.raw) + query
    scores = head.capped + head.bias
    row, mask, norms = (
        head.weights[query],
        head.visible[query],
        head.values.norm(dim=-1),
    )  # (S,) each
    logits = scores[query, mask].tolist() + ([] if head.sink is None else [head.sink])
    largest = max(logits, default=0.0)
    exponentials = (scores[query] - largest).exp()  # (S,)
    total = exponentials[mask].sum().item()
    sink_share = 0.0 if head.sink is None else math.exp(head.sink - largest)
    output, actual = row @ head.values, head.output[query]  # (D,) each
    footer = f"Σ exp = {total + sink_share:.4f}"
    footer += "; " if head.sink is None else f", of which the sink has {sink_share:.4f}; "
    footer += f"norm of the weighted sum of values: {output.norm():.4f}, of the head's output: {actual.norm():.4f}"
    steps = {"q·k": head.raw[query], f"÷ {head.divisor}": head.scaled[query]}
    if head.has_cap:
        steps["capped"] = head.capped[query]
    if head.has_bias:
        steps["bias"] = head.bias[query]
    rows = []
    for key, text in enumerate(head.labels):
        softmax = (
            ["yes", f"{exponentials[key]:.4f}", f"{row[key]:.4f}"] if mask[key] else ["no", "", "0"]
        )
        products = [f"{norms[key]:.4f}", f"{row[key] * norms[key]:.4f}"]
        rows.append(
            [
                str(key),
                text,
                *(decimal(values[key], 4) for values in steps.values()),
                *softmax,
                *products,
            ]
        )
    columns = [
        "key",
        "token",
        *steps,
        "visible",
        f"exp(· − {largest:.2f})",
        "weight",
        "|v|",
        "weight·|v|",
    ]
    data = data | {"query": position, "tokens": head.labels, "scores": head.raw[query].tolist()}
    data |= {
        "scaled": head.scaled[query].tolist(),
        "capped": head.capped[query].tolist(),
        "sink": head.sink,
    }
    data |= {"bias": head.bias[query].tolist(), "visible": mask.tolist(), "weights": row.tolist()}
    data |= {
        "values": head.values.tolist(),
        "output": output.tolist(),
        "head_output": actual.tolist(),
    }
    header = header | {"query": f"{position} {head.labels[position]}"}
    return Report(
        header, columns, rows, data, _panels(head, scores, query), footer, panels_per_row=2
    )


def _panels(head: HeadScores, scores: Tensor, query: int) -> list[Panel]:
    """Plot the matrices from raw scores to weighted values."""
    labels, hidden, panels = (
        [f"{i} {text}" for i, text in enumerate(head.labels)],
        ~head.visible,
        [],
    )
    added = head.weights * head.values.norm(dim=-1)
    for title, values, signed in (
        ("raw scores: QKᵀ", head.raw, True),
        (
            f"scores: QKᵀ ÷ {head.divisor}{' + …' if head.has_cap or head.has_bias else ''}",
            scores,
            True,
        ),
        ("scores after the mask", scores.masked_fill(hidden, torch.nan), True),
        ("attention weights: softmax", head.weights.masked_fill(hidden, torch.nan), False),
        ("softmax without the mask", scores.softmax(dim=-1), False),
        ("weight · |v|: contribution of each value", added.masked_fill(hidden, torch.nan), False),
    ):
        queries = labels[len(labels) - len(values) :]
        panels.append(
            Panel(
                title,
                values,
                queries,
                labels,
                signed,
                highlighted_row=query,
                axis_labels=ATTENTION_AXES,
            )
        )
    return panels


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UserError unless `explain` has a model and a prompt, or a JSON file and no prompt."""
    is_vector_file = arguments.model.endswith(".json") and not Path(arguments.model).is_dir()
    if (arguments.prompt is None) != is_vector_file:
        raise UserError(
            "explain needs a model with --prompt TEXT, or a JSON file (q, k, v) without --prompt"
        )
    if is_vector_file and (arguments.layer, arguments.head, arguments.checkpoint) != (
        0,
        0,
        "latest",
    ):
        raise UserError(
            f"--layer, --head and --checkpoint have no effect with {arguments.model}; remove them"
        )


def explain_vectors(path: Path, query: int) -> Report:
    """Explain attention over vectors in a JSON file, {"q": [[...], ...], "k": ..., "v": ...}, for one query.

    Optional keys: "tokens" (a label per key), "causal" (default: true). Queries belong to the last positions.
    """
    content = read_json(path)
    if unknown := content.keys() - {"q", "k", "v", "tokens", "causal"}:
        raise UserError(
            f"{path} has the unknown key {min(unknown)!r} (available: q, k, v, tokens, causal)"
        )
    q, k, v = (_matrix(path, name, content.get(name)) for name in ("q", "k", "v"))
    T, S = len(q), len(k)
    if q.shape[1] != k.shape[1] or len(v) != S or T > S:
        shapes = ", ".join(
            f"{name} {tuple(x.shape)}" for name, x in {"q": q, "k": k, "v": v}.items()
        )
        wanted = (
            "q and k need equal widths, k and v equal numbers of rows, and q at most as many rows"
        )
        raise UserError(f"{path}: the shapes are {shapes}; {wanted}")
    if not -T <= query < T:
        raise UserError(f"--query is {query}; {path} has {T} queries (use {-T} to {T - 1})")
    labels, causal = content.get("tokens", [""] * S), content.get("causal", True)
    if not (
        isinstance(labels, list)
        and len(labels) == S
        and all(isinstance(text, str) for text in labels)
    ):
        raise UserError(
            f"{path}: tokens is not a list of {S} strings; give one string per vector in k"
        )
    if not isinstance(causal, bool):
        raise UserError(f"{path}: causal is {causal!r}; use true or false")
    raw = q @ k.T  # (T, S)
    scaled = raw * q.shape[1] ** -0.5
    visible = torch.ones(T, S, dtype=torch.bool)
    visible = visible.tril(S - T) if causal else visible
    weights = scaled.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if not raw.isfinite().all():
        raise UserError(f"{path}: q·k overflows; use smaller vectors")
    head = HeadScores(
        labels,
        f"√{q.shape[1]}",
        raw,
        scaled,
        scaled,
        torch.zeros(T, S).double(),
        visible,
        weights,
        v,
        weights @ v,
    )
    return report_attention_row(head, query % T, {"vectors": str(path)}, {"q": q[query].tolist()})


def _matrix(path: Path, name: str, value: Any) -> Tensor:
    """Convert rows of equal length to a float64 tensor. Raises UserError."""
    if not (
        isinstance(value, list) and value and all(isinstance(row, list) and row for row in value)
    ):
        raise UserError(f"{path}: {name} is not a list of vectors; write it as [[1, 0.5], [0, -1]]")
    if len(value) > MAX_KEYS or len({len(row) for row in value}) > 1:
        raise UserError(
            f"{path}: {name} has {len(value)} vectors; use at most {MAX_KEYS}, all of the same length"
        )
    try:
        matrix = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(f"{path}: {name} contains values that are not numbers: {error}") from error
    if matrix.dim() != 2 or not matrix.isfinite().all():
        raise UserError(
            f"{path}: {name} contains infinite or nested values; use vectors of finite numbers"
        )
    return matrix
