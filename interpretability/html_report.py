"""Self-contained HTML report to explore a model on a prompt."""

import base64
import html
import io
import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.data.tokenizers.token_label import token_label
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability import prompt_reports
from thinker.interpretability.head_reports import MEASURES
from thinker.interpretability.plots import plot_panels
from thinker.interpretability.reports import Prompt, Report
from thinker.model import Thinker
from thinker.runtime.checks import check_computed
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

# In a file: 12 layers of 12 heads at 512 tokens, which a browser opens in a few seconds.
MAX_WEIGHTS = 144 * 512 * 513 // 2
THUMBNAIL_SIDE = 48  # pixels, at most
N_LIKELIEST = 10  # most likely next tokens
N_LENS = 5  # most likely next tokens after each layer
LOGITS_PER_BATCH = 1 << 24
# Relative to FOLDER; the first of each is shared by all pages.
STYLES = ("../../runtime/page/page_base.css", "html_report.css")
SCRIPTS = (
    "../../runtime/page/page_base.js",
    "html_report_draw.js",
    "html_report_views.js",
    "html_report.js",
)


Head = tuple[int, int]  # layer and head in it
Scores = dict[str, list[list[float]]]  # of all heads by name, (layers, H) each
FOLDER = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Explorer:
    """Data of the interactive part."""

    facts: dict[str, Any]  # numbers and names for html_report.js
    # (layers, H, side, side) bytes of round(255 √w), w the largest weight in a cell.
    thumbnails: Tensor
    # By (layer, head): deflated bytes of the rows, up to the diagonal or whole.
    weights: dict[Head, bytes]


def choose_heads(layers: int, heads: int, count: int, first: Head) -> set[Head]:
    """Choose `count` heads, including `first`, spread evenly over layers and numbers."""
    chosen = set()
    n_before = 0
    for step in range(layers):
        layer = (first[0] + step) % layers
        n_after = math.ceil((step + 1) * count / layers)
        in_layer = n_after - n_before
        for number in range(in_layer):
            # Each layer starts at another head, so that all columns are seen.
            head = first[1] + step + number * heads // in_layer
            chosen.add((layer, head % heads))
        n_before = n_after
    return chosen


@torch.no_grad()
def make_explorer(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None = None,
    contrast_token: int | None = None,
    position: int = -1,
    layer: int = 0,
    head: int = 0,
    view: str = "attention",
) -> Explorer:
    """Run the model on the prompt, with the weights of one layer in memory at a time.

    target, contrast_token, position: the prediction to attribute; by default the most likely token
    after `position`.
    layer, head, view: initial selection; the view is attention, attribution or lens.
    Raises UserError if the prompt is too long for a single head, RunError if the logits are not
    finite.
    """
    config = model.config
    T = len(prompt.tokens)
    position %= T
    bidirectional = config.prefix > 0
    size = _n_weights(T, bidirectional)
    n_heads = config.n_layers * config.n_heads
    count = min(n_heads, MAX_WEIGHTS // size)
    chosen = choose_heads(config.n_layers, config.n_heads, count, (layer, head))
    scores, thumbnails, weights = _read_weights(model, prompt.tokens, chosen)
    banner = ""
    if count < n_heads:
        banner = f"{T:,} tokens × {n_heads} heads are too many for one report: "
        banner += f"{count} heads can be opened; the others have only thumbnails and scores"
    facts = {
        "labels": prompt.labels,
        "tokens": prompt.tokens.tolist(),
        "bidirectional": bidirectional,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "scores": scores,
        "summaries": _summaries(model, scores),
        "banner": banner,
        **_predictions(model, prompt.tokens),
    }
    facts["attribution"] = _attribution(model, tokenizer, prompt, target, contrast_token, position)
    # Names of the tokens that the page shows, as a vocabulary is large.
    listed = {*facts["likeliest"]["tokens"], *facts["lens"]["tokens"], *facts["tokens"]}
    facts["names"] = {token: token_label(tokenizer, token) for token in sorted(listed)}
    facts["start"] = {"layer": layer, "head": head, "position": position, "view": view}
    facts["side"] = thumbnails.shape[-1]
    return Explorer(facts, thumbnails, weights)


def _n_weights(T: int, bidirectional: bool) -> int:
    """The number of stored weights of a head. Raises UserError if a file cannot hold them."""
    if bidirectional:
        size = T * T
        longest = math.isqrt(MAX_WEIGHTS)
    else:
        size = T * (T + 1) // 2
        longest = (math.isqrt(8 * MAX_WEIGHTS + 1) - 1) // 2
    if size > MAX_WEIGHTS:
        raise UserError(f"the prompt has {T} tokens; an HTML report can show at most {longest}")
    return size


def _itself(weights: Tensor) -> Tensor:
    """Mean weight of the token itself; (..., T, T) -> (...)."""
    return weights.diagonal(dim1=-2, dim2=-1).mean(dim=-1)


def _read_weights(
    model: Thinker, tokens: Tensor, chosen: set[Head]
) -> tuple[Scores, Tensor, dict[Head, bytes]]:
    """Scores and thumbnails of all heads, and deflated weights of the chosen heads."""
    measures = {**MEASURES, "itself": _itself}
    scores: Scores = {name: [] for name in measures}
    thumbnails = []
    deflated = {}
    T = len(tokens)
    side = min(THUMBNAIL_SIDE, T)
    stored = torch.ones(T, T, dtype=torch.bool)
    if not model.config.prefix:
        stored = stored.tril()  # above the diagonal, all weights are 0
    for layer in Progress(
        range(model.config.n_layers), desc="reading layers", leave=False, delay=1
    ):
        # One pass per layer, because the weights of all layers may not fit into memory.
        path = f"blocks.{layer}.attention.weights"
        with model.record(path) as cache:
            model(tokens[None])
        weights = cache[path][0].float()  # (H, T, T)
        n_pruned = model.config.n_heads - len(weights)
        weights = F.pad(weights, (0, 0, 0, 0, 0, n_pruned))  # zeros for pruned heads
        for name, measure in measures.items():
            scores[name].append(_round(measure(weights).tolist()))
        # Roots keep more precision for small weights; the error is at most √w/255.
        roots = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
        largest = F.adaptive_max_pool2d(roots.float()[None], side)[0]
        thumbnails.append(largest.to(torch.uint8))
        for at_layer, head in chosen:
            if at_layer == layer:
                data = roots[head][stored].numpy().tobytes()
                deflated[layer, head] = zlib.compress(data)
    return scores, torch.stack(thumbnails), deflated


def _summaries(model: Thinker, scores: Scores) -> list[list[str]]:
    """What each head mostly does, in words, (layers, H)."""
    summaries = [["pruned"] * model.config.n_heads for _ in model.blocks]
    for layer, block in enumerate(model.blocks):
        for head in range(block.attention.n_heads):
            of_head = {name: values[layer][head] for name, values in scores.items()}
            summaries[layer][head] = _summary(of_head)
    return summaries


def _summary(scores: dict[str, float]) -> str:
    """What a head with these scores mostly does, in words."""
    targets = {
        "previous": "the previous token",
        "first": "the first token",
        "itself": "the token itself",
    }
    best = max(targets, key=lambda name: scores[name])
    if scores[best] >= 0.5:
        return f"attends mostly to {targets[best]}"
    # A uniform distribution over n tokens has an entropy of log n.
    return f"spreads over about {math.exp(scores['entropy']):.1f} tokens"


def _round(values: Iterable[float]) -> list[float]:
    """Round to five digits, to keep the file small."""
    return [float(f"{value:.5g}") for value in values]


def _predictions(model: Thinker, tokens: Tensor) -> dict[str, Any]:
    """Compute flat lists: `likeliest` and `lens` by place, and figures of the real next tokens.

    likeliest (T, 10), lens (layers + 1, T, 5), next_probability (layers + 1, T − 1),
    next_rank (T − 1). Raises RunError if the logits are not finite.
    """
    with model.record("embedding", "blocks.*") as cache:
        model(tokens[None])
    rows = max(1, LOGITS_PER_BATCH // model.config.vocab_size)
    lens = []
    likeliest = []
    next_probability = []
    next_rank = []
    for depth, x in enumerate(cache.values()):  # (1, T, C)
        for start in range(0, len(tokens), rows):
            logits = model.lm_head(model.norm(x[0, start : start + rows])).float()  # (rows, V)
            probabilities = logits.softmax(dim=-1)
            check_computed([probabilities.sum().item()])
            lens.append(probabilities.topk(min(N_LENS, probabilities.shape[1])))
            # No token follows the last one.
            next_tokens = tokens[start + 1 : start + 1 + rows, None]
            with_next = probabilities[: len(next_tokens)]
            found = with_next.gather(1, next_tokens)  # (rows, 1)
            next_probability.append(found)
            if depth == len(model.blocks):
                likeliest.append(probabilities.topk(min(N_LIKELIEST, probabilities.shape[1])))
                next_rank.append((with_next > found).sum(dim=1) + 1)
    return {
        "likeliest": _flatten(likeliest),
        "lens": _flatten(lens),
        "next_probability": _round(torch.cat(next_probability).flatten().tolist()),
        "next_rank": torch.cat(next_rank).tolist(),
    }


def _flatten(parts: list[Any]) -> dict[str, Any]:
    """The results of topk(), one after the other, as flat lists for JSON."""
    ids = torch.cat([part.indices for part in parts])  # (places, k)
    probabilities = torch.cat([part.values for part in parts])  # (places, k)
    return {
        "tokens": ids.flatten().tolist(),
        "probabilities": _round(probabilities.flatten().tolist()),
        "k": ids.shape[1],
    }


def _attribution(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None,
    contrast_token: int | None,
    position: int,
) -> dict[str, Any]:
    """Attribute the prediction to tokens and components.

    by_token (T,), heads (layers, H), mlps (layers,), biases, embedding, logit.
    """
    report = prompt_reports.report_attribution(
        model, tokenizer, prompt, target, contrast_token, position
    )
    data = report.data
    facts = {
        "description": f"logit of {data['prediction']} after position {position}",
        "position": position,
        "logit": data["logit"],
        "embedding": data["embedding"],
        "mlps": _round(data["mlps"]),
        "biases": data["biases"],
    }
    heads = []
    for row in data["heads"]:
        # Pruned heads contribute nothing.
        heads.append(_round(0.0 if value is None else value for value in row))
    facts["heads"] = heads
    if "by_token" in data:
        facts["by_token"] = _round(data["by_token"])
        facts["baseline_logit"] = data["baseline_logit"]
        facts["completeness_error"] = data["completeness_error"]
    else:
        facts["by_token"] = None
        facts["reason"] = prompt_reports.NO_GRADIENT
    return facts


def write_html_report(
    path: Path, title: str, report: Report | None, explorer: Explorer | None, fold: bool = False
) -> None:
    """Write the file. `fold` collapses the table of the report. Raises UserError on failure."""
    parts = {
        "title": html.escape(title),
        "style": _concatenate(STYLES),
        "report": "" if report is None else _report(report, fold),
        "blocks": "" if explorer is None else _data_blocks(explorer),
        "script": _concatenate(SCRIPTS),
    }
    text = (FOLDER / "html_report.html").read_text("utf-8")
    if explorer is None:
        text = re.sub(r"<!--explorer-->.*?<!--/explorer-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--/?explorer-->\n?", "", text)
    # In one pass, so that inserted text is not searched.
    text = re.sub(r"<!--(\w+)-->", lambda match: parts[match[1]], text)
    # The title is a command line, which may contain invalid UTF-8.
    path.write_text(text, encoding="utf-8", errors="replace")


def _concatenate(names: tuple[str, ...]) -> str:
    """The text of these files of the page, one after the other."""
    text = ""
    for name in names:
        text += (FOLDER / name).read_text("utf-8")
    return text


def _data_blocks(explorer: Explorer) -> str:
    """The data of the interactive part, as elements that a browser does not run."""
    facts = json.dumps(explorer.facts, allow_nan=False, separators=(",", ":"))
    # json.dumps() escapes characters outside ASCII. These could close the element.
    for character in "<>&":
        facts = facts.replace(character, f"\\u{ord(character):04x}")
    blocks = [f'<script type="application/json" id="facts">{facts}</script>']
    thumbnails = zlib.compress(explorer.thumbnails.numpy().tobytes())
    blocks.append(_binary_block("thumbnails", thumbnails))
    for (layer, head), data in explorer.weights.items():
        blocks.append(_binary_block(f"w-{layer}-{head}", data))
    return "\n".join(blocks)


def _binary_block(name: str, data: bytes) -> str:
    kind = "application/octet-stream;base64"
    return f'<script type="{kind}" id="{name}">{_base64(data)}</script>'


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _report(report: Report, fold: bool) -> str:
    """Format the report as a table that needs no script."""
    header = ""
    for name, value in report.header.items():
        header += f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>"
    columns = ""
    for column in report.columns:
        columns += f'<th scope="col">{html.escape(column)}</th>'
    rows = ""
    for row in report.rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        rows += f"<tr>{cells}</tr>\n"
    buffer = io.BytesIO()
    plot_panels(report.panels, buffer, "", report.panels_per_row)
    is_open = "" if fold else " open"
    return f"""<details class="card" id="report"{is_open}>
<summary>Report of the command</summary>
<dl>{header}</dl>
<img alt="plot of the report" src="data:image/png;base64,{_base64(buffer.getvalue())}">
<div class="scroll" role="region" aria-label="table of the report" tabindex="0">
<table><thead><tr>{columns}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>{html.escape(report.footer)}</p>
</details>"""
