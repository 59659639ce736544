"""One HTML file that shows what is inside a model for one prompt; it needs no server, no network, no other file."""

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
from thinker.interpretability import attribution
from thinker.interpretability.plots import plot_panels
from thinker.interpretability.reports import (
    MEASURES,
    NO_GRADIENT,
    Prompt,
    Report,
    by_tokens,
    label,
    likeliest_next_token,
)
from thinker.model import Thinker
from thinker.runtime.errors import UserError

CELLS = 144 * 512 * 513 // 2  # that a page may hold: 12 layers of 12 heads at 512 tokens, which open in a few seconds
THUMBNAIL = 48  # rows and columns of a thumbnail, at most
LIKELIEST, LENS = 10, 5  # tokens that are named: of what comes next, and after each layer
AT_ONCE = 1 << 24  # logits that are computed at once
VIEWS = ("attention", "attribution", "lens")
SCRIPTS = ("html_report_draw.js", "html_report_views.js", "html_report.js")


@dataclass(frozen=True)
class Explorer:
    """What the interactive part shows.

    Attributes:
        facts: numbers and names, as html_report.js reads them; see make_explorer().
        thumbnails: (layers, H, side, side) bytes of round(255 √w), w the largest weight of what each cell covers.
        weights: (layer, head) -> bytes of round(255 √w), deflated: row after row, each to the diagonal; whole rows if
            facts["ahead"].
    """

    facts: dict[str, Any]
    thumbnails: Tensor
    weights: dict[tuple[int, int], bytes]


def cells(length: int, ahead: bool) -> int:
    """How many weights of a head are kept."""
    return length * length if ahead else length * (length + 1) // 2


def spread(layers: int, heads: int, count: int, around: tuple[int, int]) -> set[tuple[int, int]]:
    """`count` of all heads, evenly over layers and over the heads of each, `around` among them.

    The layers begin at that of `around`, each with its share of what is left; other layers take other heads.
    """
    found = set()
    for step in range(layers):
        layer, share = (around[0] + step) % layers, -(-(step + 1) * count // layers) - -(-step * count // layers)
        found |= {(layer, (around[1] + step + at * heads // share) % heads) for at in range(share)}
    return found


@torch.no_grad()
def make_explorer(
    model: Thinker,
    tokenizer: Tokenizer,
    prompt: Prompt,
    target: int | None = None,
    contrast_token: int | None = None,
    position: int = -1,
    around: tuple[int, int] = (0, 0),
) -> Explorer:
    """Run the model over the prompt, once for each layer's weights, so that those of one layer are held at a time.

    Args:
        target, contrast_token, position: the prediction to attribute; by default the likeliest token after `position`.
        around: (layer, head) that can be opened in any case, where not all can.

    Raises UserError for a prompt of which not even one head fits on a page, or logits that are not finite.
    """
    config, T = model.config, len(prompt.tokens)
    ahead, layers, H = config.prefix > 0, config.n_layers, config.n_heads
    size = cells(T, ahead)
    if size > CELLS:
        longest = math.isqrt(CELLS) if ahead else (math.isqrt(8 * CELLS + 1) - 1) // 2
        raise UserError(f"the prompt has {T} tokens; the longest that a page can show has {longest}")
    count = min(layers * H, CELLS // size)
    whole = spread(layers, H, count, around)
    scores = {name: [] for name in (*MEASURES, "itself")}
    thumbnails, weights = [], {}
    for layer in tqdm(range(layers), desc="looking into layers", leave=False, delay=1):
        measured, small, large = _layer(model, prompt.tokens, layer, [head for at, head in whole if at == layer])
        for name, values in measured.items():
            scores[name].append(values)
        thumbnails.append(small)
        weights |= {(layer, head): data for head, data in large.items()}
    facts = {"labels": prompt.labels, "tokens": prompt.tokens.tolist(), "ahead": ahead, "layers": layers, "heads": H}
    facts |= {"scores": scores, "looks": _in_words(model, scores), "banner": ""}
    if count < layers * H:
        facts["banner"] = (
            f"{T:,} tokens × {layers * H} heads are more than one page holds: {count} heads can be opened, "
            "the others show thumbnails and scores only"
        )
    facts |= _said(model, prompt.tokens) | _attributed(model, tokenizer, prompt, target, contrast_token, position)
    named = {*facts["likeliest"]["tokens"], *facts["lens"]["tokens"], *facts["tokens"]}
    facts["names"] = {token: label(tokenizer, token) for token in sorted(named)}
    return Explorer(facts, torch.stack(thumbnails), weights)


def _layer(
    model: Thinker, tokens: Tensor, layer: int, whole: list[int]
) -> tuple[dict[str, list[float]], Tensor, dict[int, bytes]]:
    """Measures of a layer's heads, their thumbnails (H, side, side), and the deflated weights of those in `whole`."""
    name = f"blocks.{layer}.attention.weights"
    with model.record(name) as seen:
        model(tokens[None])
    weights = seen[name][0].float()  # (H, T, T)
    weights = F.pad(weights, (0, 0, 0, 0, 0, model.config.n_heads - len(weights)))  # what was pruned looks at nothing
    found = {name: measure(weights) for name, measure in MEASURES.items()}
    found["itself"] = weights.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    # Of the root: small weights keep more of their digits, and the error is at most √w/255.
    coarse = (weights.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu()
    small = F.adaptive_max_pool2d(coarse.float()[None], min(THUMBNAIL, len(tokens)))[0].to(torch.uint8)
    large = {}
    for head in whole:
        rows = coarse[head].numpy()
        full = model.config.prefix > 0
        large[head] = zlib.compress(b"".join((row if full else row[: at + 1]).tobytes() for at, row in enumerate(rows)))
    return {name: _rounded(values) for name, values in found.items()}, small, large


def _in_words(model: Thinker, scores: dict[str, list[list[float]]]) -> list[list[str]]:
    """What each head does on the whole, (layers, H)."""
    shares = {"previous": "the previous token", "first": "the first token", "itself": "the token itself"}

    def words(layer: int, head: int) -> str:
        if head >= model.blocks[layer].attention.n_heads:
            return "pruned"
        name = max(shares, key=lambda name: scores[name][layer][head])
        if scores[name][layer][head] >= 0.5:
            return f"looks mostly at {shares[name]}"
        return f"spreads over about {math.exp(scores['entropy'][layer][head]):.1f} tokens"

    return [[words(layer, head) for head in range(len(row))] for layer, row in enumerate(scores["entropy"])]


def _rounded(values: Tensor) -> list[float]:
    """With five digits: more would only make the page larger."""
    return [float(f"{value:.5g}") for value in values.flatten().tolist()]


def _said(model: Thinker, tokens: Tensor) -> dict[str, Any]:
    """What the model says after each position: its likeliest tokens, those after each layer, what really follows.

    Lists are flat: `likeliest` (T, 10), `lens` (layers + 1, T, 5), `follows` (layers + 1, T − 1), `rank` (T − 1).
    """
    with model.record("embedding", "blocks.*") as seen:
        model(tokens[None])
    rows = max(1, AT_ONCE // model.config.vocab_size)
    lens, follows, rank = [], [], []
    likeliest = []
    for depth, x in enumerate(seen.values()):  # (1, T, C)
        begin = 0
        for some in x[0].split(rows):
            shares = model.lm_head(model.norm(some)).float().softmax(dim=-1)  # (rows, V)
            if not shares.isfinite().all():
                raise UserError("the model's logits are not finite, so there is nothing to show")
            lens.append(shares.topk(min(LENS, shares.shape[1])))
            next_ones = tokens[begin + 1 : begin + 1 + len(some), None]
            given = shares[: len(next_ones)].gather(1, next_ones)  # (rows, 1)
            follows.append(given)
            begin += len(some)
            if depth == len(model.blocks):
                likeliest.append(shares.topk(min(LIKELIEST, shares.shape[1])))
                rank.append((shares[: len(next_ones)] > given).sum(dim=1) + 1)

    def lists(found: list[Any]) -> dict[str, Any]:
        ids, shares = torch.cat([top.indices for top in found]), torch.cat([top.values for top in found])
        return {"tokens": ids.flatten().tolist(), "shares": _rounded(shares), "each": ids.shape[1]}

    return {
        "likeliest": lists(likeliest),
        "lens": lists(lens),
        "follows": _rounded(torch.cat(follows)),
        "rank": torch.cat(rank).tolist(),
    }


def _attributed(
    model: Thinker, tokenizer: Tokenizer, prompt: Prompt, target: int | None, contrast_token: int | None, position: int
) -> dict[str, Any]:
    """What the prediction is made of: `given` by tokens (T,), `heads` (layers, H), `mlps`, `embedding`; y."""
    position %= len(prompt.tokens)
    target = likeliest_next_token(model, prompt, position) if target is None else target
    parts = attribution.direct_logit_attribution(model, prompt.tokens, target, contrast_token, position)
    what = f"logit of ‘{label(tokenizer, target)}’"
    what += "" if contrast_token is None else f" rather than ‘{label(tokenizer, contrast_token)}’"
    found = {
        "what": f"{what} after position {position}",
        "y": parts.y,
        "embedding": parts.embedding,
        "position": position,
    }
    found |= {"heads": [_rounded(row.nan_to_num()) for row in parts.heads], "mlps": _rounded(parts.mlps)}
    of_tokens = by_tokens(model, tokenizer, prompt, target, contrast_token, position)
    if of_tokens is None:
        found |= {"given": None, "why": NO_GRADIENT}
    else:
        given, empty, missed = of_tokens
        found |= {"given": _rounded(given), "empty": empty, "missed": missed}
    return {"attribution": found}


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
    """Write the page, opened at a head, a position and one of VIEWS; the report may be folded.

    Raises UserError where it cannot be written.
    """
    here = Path(__file__).parent
    blocks = []
    if explorer is not None:
        start = {"layer": layer, "head": head, "position": position % len(explorer.facts["labels"]), "view": view}
        facts = {**explorer.facts, "start": start, "side": explorer.thumbnails.shape[-1]}
        blocks = [_json("facts", facts), _bytes("thumbnails", zlib.compress(explorer.thumbnails.numpy().tobytes()))]
        blocks += [_bytes(f"w-{layer}-{head}", data) for (layer, head), data in explorer.weights.items()]
    parts = {
        "title": html.escape(title),
        "style": (here / "html_report.css").read_text("utf-8"),
        "report": "" if report is None else _report(report, fold),
        "blocks": "\n".join(blocks),
        "script": "".join((here / name).read_text("utf-8") for name in SCRIPTS),
    }
    page = (here / "html_report.html").read_text("utf-8")
    if explorer is None:
        page = re.sub(r"<!--explorer-->.*?<!--/explorer-->", "", page, flags=re.DOTALL)
    page = re.sub(r"<!--/?explorer-->\n?", "", page)
    page = re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], page)  # in one pass: what is filled in is left alone
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # a command line may hold half a character
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _json(name: str, value: Any) -> str:
    """A block of JSON that no text in it can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # all but ASCII is escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _bytes(name: str, data: bytes) -> str:
    text = base64.b64encode(data).decode("ascii")
    return f'<script type="application/octet-stream;base64" id="{name}">{text}</script>'


def _report(report: Report, fold: bool) -> str:
    """What a command found, as a table that is there without any script."""
    text = html.escape
    about = "".join(f"<dt>{text(name)}</dt><dd>{text(str(value))}</dd>" for name, value in report.about.items())
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in report.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>\n" for row in report.rows)
    picture = io.BytesIO()
    plot_panels(report.panels, picture, "", report.across)
    picture = base64.b64encode(picture.getvalue()).decode("ascii")
    return f"""<details class="card" id="report"{"" if fold else " open"}>
<summary>The command's table</summary>
<dl>{about}</dl>
<img alt="A picture of what the table says" src="data:image/png;base64,{picture}">
<div class="scroll" role="region" aria-label="table of the report" tabindex="0">
<table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>{text(report.after)}</p>
</details>"""
