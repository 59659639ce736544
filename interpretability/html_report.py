"""One HTML file to explore what a model does with a prompt; it needs no server, no network, no other file."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from thinker.data.tokenizer import Tokenizer
from thinker.interpretability import attribution, prompt_reports
from thinker.interpretability.head_reports import MEASURES
from thinker.interpretability.plots import plot_panels
from thinker.interpretability.reports import Prompt, Report, token_label, write_errors
from thinker.model import Thinker
from thinker.runtime.errors import UserError

MAX_WEIGHTS = 144 * 512 * 513 // 2  # in one file: 12 layers of 12 heads at 512 tokens, which open in a few seconds
THUMBNAIL_SIDE = 48  # at most
N_LIKELIEST, N_LENS = 10, 5  # likeliest tokens listed for the next token, and after each layer
LOGITS_PER_BATCH = 1 << 24
SCRIPTS = ("html_report_draw.js", "html_report_views.js", "html_report.js")


@dataclass(frozen=True)
class Explorer:
    """What the interactive part shows.

    Attributes:
        facts: numbers and names, as html_report.js reads them; see make_explorer().
        thumbnails: (layers, H, side, side) bytes of round(255 √w), w the largest weight that each cell covers.
        weights: (layer, head) -> the same bytes, deflated: rows up to the diagonal, or whole if facts["bidirectional"].
    """

    facts: dict[str, Any]
    thumbnails: Tensor
    weights: dict[tuple[int, int], bytes]


def count_weights(length: int, bidirectional: bool) -> int:
    """How many weights of a head the file stores."""
    return length * length if bidirectional else length * (length + 1) // 2


def choose_heads(layers: int, heads: int, count: int, first: tuple[int, int]) -> set[tuple[int, int]]:
    """`count` (layer, head), including `first`, spread evenly over the layers and over the heads of each."""
    chosen = set()
    for step in range(layers):
        layer = (first[0] + step) % layers
        in_layer = -(-(step + 1) * count // layers) - -(-step * count // layers)
        chosen |= {(layer, (first[1] + step + i * heads // in_layer) % heads) for i in range(in_layer)}
    return chosen


@torch.no_grad()
def make_explorer(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None = None,
    contrast_token: int | None = None,
    position: int = -1,
    first: tuple[int, int] = (0, 0),
) -> Explorer:
    """Run the model over the prompt, once per layer, to keep only one layer's weights in memory.

    Args:
        target, contrast_token, position: the prediction to attribute; by default the likeliest token after `position`.
        first: (layer, head) that can be opened in any case, if not all can.

    Raises UserError if not even one head of the prompt fits into a file, or the logits are not finite.
    """
    config, T = model.config, len(prompt.tokens)
    bidirectional, layers, H = config.prefix > 0, config.n_layers, config.n_heads
    size = count_weights(T, bidirectional)
    if size > MAX_WEIGHTS:
        longest = math.isqrt(MAX_WEIGHTS) if bidirectional else (math.isqrt(8 * MAX_WEIGHTS + 1) - 1) // 2
        raise UserError(f"the prompt has {T} tokens; the longest that an HTML report can show has {longest}")
    count = min(layers * H, MAX_WEIGHTS // size)
    chosen = choose_heads(layers, H, count, first)
    scores = {name: [] for name in (*MEASURES, "itself")}
    thumbnails, weights = [], {}
    for layer in tqdm(range(layers), desc="reading layers", leave=False, delay=1):
        heads = [head for chosen_layer, head in chosen if chosen_layer == layer]
        layer_scores, layer_thumbnails, layer_weights = _read_layer(model, prompt.tokens, layer, heads)
        for name, values in layer_scores.items():
            scores[name].append(values)
        thumbnails.append(layer_thumbnails)
        weights |= {(layer, head): data for head, data in layer_weights.items()}
    facts = {"labels": prompt.labels, "tokens": prompt.tokens.tolist(), "bidirectional": bidirectional}
    facts |= {"layers": layers, "heads": H, "scores": scores, "summaries": _summaries(model, scores), "banner": ""}
    if count < layers * H:
        facts["banner"] = (
            f"{T:,} tokens × {layers * H} heads are too many for one report: {count} heads can be opened, "
            "the others show thumbnails and scores only"
        )
    facts |= _predictions(model, prompt.tokens)
    facts["attribution"] = _attribution(model, tokenizer, prompt, target, contrast_token, position)
    listed = {*facts["likeliest"]["tokens"], *facts["lens"]["tokens"], *facts["tokens"]}
    facts["names"] = {token: token_label(tokenizer, token) for token in sorted(listed)}
    return Explorer(facts, torch.stack(thumbnails), weights)


def _read_layer(
    model: Thinker, tokens: Tensor, layer: int, heads: list[int]
) -> tuple[dict[str, list[float]], Tensor, dict[int, bytes]]:
    """Scores of a layer's heads, their thumbnails (H, side, side), and the deflated weights of the given heads."""
    name = f"blocks.{layer}.attention.weights"
    with model.record(name) as cache:
        model(tokens[None])
    weights = cache[name][0].float()  # (H, T, T)
    weights = F.pad(weights, (0, 0, 0, 0, 0, model.config.n_heads - len(weights)))  # zeros for pruned heads
    scores = {name: measure(weights) for name, measure in MEASURES.items()}
    scores["itself"] = weights.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # Roots keep more digits of small weights; the error is at most √w/255.
    roots = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
    side = min(THUMBNAIL_SIDE, len(tokens))
    thumbnails = F.adaptive_max_pool2d(roots.float()[None], side)[0].to(torch.uint8)
    deflated = {}
    for head in heads:
        rows = list(roots[head].numpy())
        if model.config.prefix == 0:
            rows = [row[: query + 1] for query, row in enumerate(rows)]
        deflated[head] = zlib.compress(b"".join(row.tobytes() for row in rows))
    return {name: _round(values) for name, values in scores.items()}, thumbnails, deflated


def _summaries(model: Thinker, scores: dict[str, list[list[float]]]) -> list[list[str]]:
    """What each head mostly does, in words, (layers, H)."""
    targets = {"previous": "the previous token", "first": "the first token", "itself": "the token itself"}

    def summary(layer: int, head: int) -> str:
        if head >= model.blocks[layer].attention.n_heads:
            return "pruned"
        name = max(targets, key=lambda name: scores[name][layer][head])
        if scores[name][layer][head] >= 0.5:
            return f"attends mostly to {targets[name]}"
        return f"spreads over about {math.exp(scores['entropy'][layer][head]):.1f} tokens"

    return [[summary(layer, head) for head in range(len(row))] for layer, row in enumerate(scores["entropy"])]


def _round(values: Tensor) -> list[float]:
    """Five digits, to keep the file small."""
    return [float(f"{value:.5g}") for value in values.flatten().tolist()]


def _predictions(model: Thinker, tokens: Tensor) -> dict[str, Any]:
    """The likeliest next tokens at each position, those after each layer, and how likely the true next token is.

    Lists are flat: `likeliest` (T, 10), `lens` (layers + 1, T, 5), `next_probability` (layers + 1, T − 1),
    `next_rank` (T − 1).
    """
    with model.record("embedding", "blocks.*") as cache:
        model(tokens[None])
    rows = max(1, LOGITS_PER_BATCH // model.config.vocab_size)
    lens, likeliest, next_probability, next_rank = [], [], [], []
    for depth, x in enumerate(cache.values()):  # (1, T, C)
        for start in range(0, len(tokens), rows):
            probabilities = model.lm_head(model.norm(x[0, start : start + rows])).float().softmax(dim=-1)  # (rows, V)
            if not probabilities.isfinite().all():
                raise UserError("the model's logits are not finite, so there is nothing to show")
            lens.append(probabilities.topk(min(N_LENS, probabilities.shape[1])))
            next_tokens = tokens[start + 1 : start + 1 + rows, None]
            of_next = probabilities[: len(next_tokens)].gather(1, next_tokens)  # (rows, 1)
            next_probability.append(of_next)
            if depth == len(model.blocks):
                likeliest.append(probabilities.topk(min(N_LIKELIEST, probabilities.shape[1])))
                next_rank.append((probabilities[: len(next_tokens)] > of_next).sum(dim=1) + 1)

    def flatten(top: list[Any]) -> dict[str, Any]:
        ids, probabilities = torch.cat([part.indices for part in top]), torch.cat([part.values for part in top])
        return {"tokens": ids.flatten().tolist(), "probabilities": _round(probabilities), "k": ids.shape[1]}

    next_token = {"next_probability": _round(torch.cat(next_probability)), "next_rank": torch.cat(next_rank).tolist()}
    return {"likeliest": flatten(likeliest), "lens": flatten(lens), **next_token}


def _attribution(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int | None, contrast_token: int | None, position: int
) -> dict[str, Any]:
    """What makes up the prediction: `by_token` (T,), `heads` (layers, H), `mlps` (layers,), `embedding`, `logit`."""
    position %= len(prompt.tokens)
    target = prompt_reports.likeliest_next_token(model, prompt, position) if target is None else target
    components = attribution.direct_logit_attribution(model, prompt.tokens, target, contrast_token, position)
    description = prompt_reports.describe_target(tokenizer, target, contrast_token)
    facts = {"description": f"logit of {description} after position {position}", "position": position}
    facts |= {"logit": components.logit, "embedding": components.embedding, "mlps": _round(components.mlps)}
    facts["heads"] = [_round(row.nan_to_num()) for row in components.heads]
    by_token = prompt_reports.attribute_to_tokens(model, tokenizer, prompt, target, contrast_token, position)
    if by_token is None:
        return facts | {"by_token": None, "reason": prompt_reports.NO_GRADIENT}
    values, baseline, error = by_token
    return facts | {"by_token": _round(values), "baseline_logit": baseline, "completeness_error": error}


def write_html_report(
    path: Path,
    title: str,
    report: Report | None,
    explorer: Explorer | None,
    layer: int = 0,
    head: int = 0,
    position: int = -1,
    view: str = "attention",
    fold: bool = False,
) -> None:
    """Write the file. Raises UserError if that fails.

    view: the first one shown, attention, attribution or lens. fold: hide the report's table at first.
    """
    folder = Path(__file__).parent
    blocks = []
    if explorer is not None:
        start = {"layer": layer, "head": head, "position": position % len(explorer.facts["labels"]), "view": view}
        facts = {**explorer.facts, "start": start, "side": explorer.thumbnails.shape[-1]}
        blocks = [_json("facts", facts), _bytes("thumbnails", zlib.compress(explorer.thumbnails.numpy().tobytes()))]
        blocks += [_bytes(f"w-{layer}-{head}", data) for (layer, head), data in explorer.weights.items()]
    parts = {
        "title": html.escape(title),
        "style": (folder / "html_report.css").read_text("utf-8"),
        "report": "" if report is None else _report(report, fold),
        "blocks": "\n".join(blocks),
        "script": "".join((folder / name).read_text("utf-8") for name in SCRIPTS),
    }
    text = (folder / "html_report.html").read_text("utf-8")
    if explorer is None:
        text = re.sub(r"<!--explorer-->.*?<!--/explorer-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--/?explorer-->\n?", "", text)
    text = re.sub(r"<!--(\w+)-->", lambda match: parts[match[1]], text)  # one pass: inserted text is not searched
    with write_errors(path):
        path.write_text(text, encoding="utf-8", errors="replace")  # a command line may hold half a character


def _json(name: str, value: Any) -> str:
    """A script element of JSON, in which no text can close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # all but ASCII is escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _bytes(name: str, data: bytes) -> str:
    text = base64.b64encode(data).decode("ascii")
    return f'<script type="application/octet-stream;base64" id="{name}">{text}</script>'


def _report(report: Report, fold: bool) -> str:
    """The command's report as a table that needs no script."""
    header = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in report.header.items())
    columns = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in report.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in report.rows)
    buffer = io.BytesIO()
    plot_panels(report.panels, buffer, "", report.panels_per_row)
    image = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f"""<details class="card" id="report"{"" if fold else " open"}>
<summary>The command's table</summary>
<dl>{header}</dl>
<img alt="A plot of the table" src="data:image/png;base64,{image}">
<div class="scroll" role="region" aria-label="table of the report" tabindex="0">
<table><thead><tr>{columns}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>{html.escape(report.footer)}</p>
</details>"""
