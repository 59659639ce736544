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
from tqdm import tqdm

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interpretability import prompt_reports
from thinker.interpretability.head_reports import MEASURES
from thinker.interpretability.plots import plot_panels
from thinker.interpretability.reports import Prompt, Report, token_label
from thinker.model import Thinker
from thinker.runtime.checks import check_computed
from thinker.runtime.errors import UserError

MAX_WEIGHTS = (
    144 * 512 * 513 // 2
)  # in a file: 12 layers of 12 heads at 512 tokens open in a few seconds
THUMBNAIL_SIDE = 48  # pixels, at most
N_LIKELIEST, N_LENS = 10, 5  # most likely tokens for the next token, and after each layer
LOGITS_PER_BATCH = 1 << 24
SCRIPTS = ("page_base.js", "html_report_draw.js", "html_report_views.js", "html_report.js")


@dataclass(frozen=True)
class Explorer:
    """Data of the interactive part."""

    facts: dict[str, Any]  # numbers and names for html_report.js
    thumbnails: (
        Tensor  # (layers, H, side, side) bytes of round(255 √w), w the largest weight in a cell
    )
    weights: dict[
        tuple[int, int], bytes
    ]  # (layer, head) -> deflated bytes of rows up to the diagonal, or whole rows


def choose_heads(
    layers: int, heads: int, count: int, first: tuple[int, int]
) -> set[tuple[int, int]]:
    """Choose `count` (layer, head) pairs, including `first`, spread evenly over layers and heads."""
    chosen = set()
    for step in range(layers):
        layer = (first[0] + step) % layers
        in_layer = -(-(step + 1) * count // layers) - -(-step * count // layers)
        chosen |= {
            (layer, (first[1] + step + i * heads // in_layer) % heads) for i in range(in_layer)
        }
    return chosen


@torch.no_grad()
def make_explorer(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int | None = None, contrast_token: int | None = None,
    position: int = -1, layer: int = 0, head: int = 0, view: str = "attention",
) -> Explorer:  # fmt: skip
    """Run the model on the prompt, with the weights of one layer in memory at a time.

    target, contrast_token, position: the prediction to attribute; by default the most likely token after `position`.
    layer, head, view: initial selection; the view is attention, attribution or lens.
    Raises UserError if the prompt is too long for a single head, RunError if the logits are not finite.
    """
    config, T = model.config, len(prompt.tokens)
    bidirectional, layers, H = config.prefix > 0, config.n_layers, config.n_heads
    size = T * T if bidirectional else T * (T + 1) // 2  # weights of a head
    if size > MAX_WEIGHTS:
        longest = (
            math.isqrt(MAX_WEIGHTS) if bidirectional else (math.isqrt(8 * MAX_WEIGHTS + 1) - 1) // 2
        )
        raise UserError(f"the prompt has {T} tokens; an HTML report can show at most {longest}")
    count, position = min(layers * H, MAX_WEIGHTS // size), position % T
    scores, thumbnails, weights = _read_weights(
        model, prompt.tokens, choose_heads(layers, H, count, (layer, head))
    )
    facts = {
        "labels": prompt.labels,
        "tokens": prompt.tokens.tolist(),
        "bidirectional": bidirectional,
    }
    facts |= {
        "layers": layers,
        "heads": H,
        "scores": scores,
        "summaries": _summaries(model, scores),
        "banner": "",
    }
    if count < layers * H:
        facts["banner"] = f"{T:,} tokens × {layers * H} heads are too many for one report: "
        facts["banner"] += (
            f"{count} heads can be opened; the others have only thumbnails and scores"
        )
    facts |= _predictions(model, prompt.tokens)
    facts["attribution"] = _attribution(model, tokenizer, prompt, target, contrast_token, position)
    listed = {*facts["likeliest"]["tokens"], *facts["lens"]["tokens"], *facts["tokens"]}
    facts["names"] = {token: token_label(tokenizer, token) for token in sorted(listed)}
    facts["start"] = {"layer": layer, "head": head, "position": position, "view": view}
    return Explorer(facts | {"side": thumbnails.shape[-1]}, thumbnails, weights)


def _read_weights(
    model: Thinker, tokens: Tensor, chosen: set[tuple[int, int]]
) -> tuple[dict[str, list[list[float]]], Tensor, dict[tuple[int, int], bytes]]:
    """Compute scores (layers, H) and thumbnails of all heads, and deflated weights of the chosen heads."""
    measures = {
        **MEASURES,
        "itself": lambda weights: weights.diagonal(dim1=-2, dim2=-1).mean(dim=-1),
    }
    scores, thumbnails, deflated = {name: [] for name in measures}, [], {}
    T = len(tokens)
    side, stored = (
        min(THUMBNAIL_SIDE, T),
        torch.ones(T, T, dtype=torch.bool).tril(T if model.config.prefix else 0),
    )
    for layer in tqdm(range(model.config.n_layers), desc="reading layers", leave=False, delay=1):
        name = f"blocks.{layer}.attention.weights"
        with model.record(name) as cache:
            model(tokens[None])
        weights = cache[name][0].float()  # (H, T, T)
        weights = F.pad(
            weights, (0, 0, 0, 0, 0, model.config.n_heads - len(weights))
        )  # zeros for pruned heads
        for name, measure in measures.items():
            scores[name].append(_round(measure(weights).tolist()))
        # Roots keep more precision for small weights; the error is at most √w/255.
        roots = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
        thumbnails.append(F.adaptive_max_pool2d(roots.float()[None], side)[0].to(torch.uint8))
        for head in (head for at_layer, head in chosen if at_layer == layer):
            deflated[layer, head] = zlib.compress(roots[head][stored].numpy().tobytes())
    return scores, torch.stack(thumbnails), deflated


def _summaries(model: Thinker, scores: dict[str, list[list[float]]]) -> list[list[str]]:
    """What each head mostly does, in words, (layers, H)."""
    targets = {
        "previous": "the previous token",
        "first": "the first token",
        "itself": "the token itself",
    }
    summaries = [["pruned"] * model.config.n_heads for _ in model.blocks]
    for layer, block in enumerate(model.blocks):
        for head in range(block.attention.n_heads):
            shares = [(scores[name][layer][head], words) for name, words in targets.items()]
            share, words = max(shares, key=lambda pair: pair[0])
            spread = f"spreads over about {math.exp(scores['entropy'][layer][head]):.1f} tokens"
            summaries[layer][head] = f"attends mostly to {words}" if share >= 0.5 else spread
    return summaries


def _round(values: Iterable[float]) -> list[float]:
    """Round to five digits, to keep the file small."""
    return [float(f"{value:.5g}") for value in values]


def _predictions(model: Thinker, tokens: Tensor) -> dict[str, Any]:
    """Compute flat lists: `likeliest` (T, 10), `lens` (layers + 1, T, 5), `next_probability` and `next_rank`."""
    with model.record("embedding", "blocks.*") as cache:
        model(tokens[None])
    rows = max(1, LOGITS_PER_BATCH // model.config.vocab_size)
    lens, likeliest, next_probability, next_rank = [], [], [], []
    for depth, x in enumerate(cache.values()):  # (1, T, C)
        for start in range(0, len(tokens), rows):
            probabilities = (
                model.lm_head(model.norm(x[0, start : start + rows])).float().softmax(dim=-1)
            )  # (rows, V)
            check_computed([probabilities.sum().item()])
            lens.append(probabilities.topk(min(N_LENS, probabilities.shape[1])))
            next_tokens = tokens[start + 1 : start + 1 + rows, None]
            next_probability.append(
                probabilities[: len(next_tokens)].gather(1, next_tokens)
            )  # (rows, 1)
            if depth == len(model.blocks):
                likeliest.append(probabilities.topk(min(N_LIKELIEST, probabilities.shape[1])))
                next_rank.append(
                    (probabilities[: len(next_tokens)] > next_probability[-1]).sum(dim=1) + 1
                )

    def flatten(top: list[Any]) -> dict[str, Any]:
        ids, probabilities = (
            torch.cat([part.indices for part in top]),
            torch.cat([part.values for part in top]),
        )
        shown = _round(probabilities.flatten().tolist())
        return {"tokens": ids.flatten().tolist(), "probabilities": shown, "k": ids.shape[1]}

    facts = {"likeliest": flatten(likeliest), "lens": flatten(lens)}
    facts["next_probability"] = _round(torch.cat(next_probability).flatten().tolist())
    return facts | {"next_rank": torch.cat(next_rank).tolist()}


def _attribution(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None,
    contrast_token: int | None,
    position: int,
) -> dict[str, Any]:
    """Attribute the prediction: `by_token` (T,), `heads` (layers, H), `mlps` (layers,), `embedding`, `logit`."""
    data = prompt_reports.report_attribution(
        model, tokenizer, prompt, target, contrast_token, position
    ).data
    facts = {
        "description": f"logit of {data['prediction']} after position {position}",
        "position": position,
    }
    facts |= {"logit": data["logit"], "embedding": data["embedding"], "mlps": _round(data["mlps"])}
    facts["heads"] = [_round(0.0 if x is None else x for x in row) for row in data["heads"]]
    if "by_token" not in data:
        return facts | {"by_token": None, "reason": prompt_reports.NO_GRADIENT}
    facts["by_token"] = _round(data["by_token"])
    return facts | {name: data[name] for name in ("baseline_logit", "completeness_error")}


def write_html_report(
    path: Path, title: str, report: Report | None, explorer: Explorer | None, fold: bool = False
) -> None:
    """Write the file. `fold` collapses the table of the report. Raises UserError on failure."""
    folder = Path(__file__).parent / "page"
    scripts = []
    if explorer is not None:
        facts = json.dumps(
            explorer.facts, allow_nan=False, separators=(",", ":")
        )  # escapes non-ASCII characters
        facts = facts.translate(
            {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
        )  # text cannot close the element
        blobs = {"thumbnails": zlib.compress(explorer.thumbnails.numpy().tobytes())}
        blobs |= {f"w-{layer}-{head}": data for (layer, head), data in explorer.weights.items()}
        scripts.append(f'<script type="application/json" id="facts">{facts}</script>')
        for name, data in blobs.items():
            scripts.append(
                f'<script type="application/octet-stream;base64" id="{name}">{_base64(data)}</script>'
            )
    parts = {
        "title": html.escape(title),
        "style": "".join(
            (folder / name).read_text("utf-8") for name in ("page_base.css", "html_report.css")
        ),
        "report": "" if report is None else _report(report, fold),
        "blocks": "\n".join(scripts),
        "script": "".join((folder / name).read_text("utf-8") for name in SCRIPTS),
    }
    text = (folder / "html_report.html").read_text("utf-8")
    if explorer is None:
        text = re.sub(r"<!--explorer-->.*?<!--/explorer-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--/?explorer-->\n?", "", text)
    text = re.sub(
        r"<!--(\w+)-->", lambda match: parts[match[1]], text
    )  # one pass, so inserted text is not searched
    path.write_text(
        text, encoding="utf-8", errors="replace"
    )  # a command line may contain invalid UTF-8


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _report(report: Report, fold: bool) -> str:
    """Format the report as a table that needs no script."""
    header = "".join(
        f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in report.header.items()
    )
    columns = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in report.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n"
        for row in report.rows
    )
    buffer = io.BytesIO()
    plot_panels(report.panels, buffer, "", report.panels_per_row)
    return f"""<details class="card" id="report"{"" if fold else " open"}>
<summary>Report of the command</summary>
<dl>{header}</dl>
<img alt="plot of the report" src="data:image/png;base64,{_base64(buffer.getvalue())}">
<div class="scroll" role="region" aria-label="table of the report" tabindex="0">
<table><thead><tr>{columns}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>{html.escape(report.footer)}</p>
</details>"""
