"""A report as one HTML file that asks for nothing from a network."""

import base64
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from thinker.features.run_report.attention_picture import (
    MAX_SIDE,
    AttentionPicture,
    transparent_png,
)
from thinker.features.run_report.history import spread
from thinker.features.run_report.loss_curves import Curve, LossCurves
from thinker.features.run_report.report_facts import RUNNING, ReportFacts, Table
from thinker.runtime.process.standard_streams import visible

FOLDER = Path(__file__).parent / "page"
STYLES = ("../../../runtime/page/page_base.css", "run_report.css")
SCRIPTS = ("../../../runtime/page/page_base.js", "run_report.js")
SIDE = 1000  # of the coordinates of a curve; the page stretches them
LABEL_WIDTH = 96  # of the large picture of attention, in units of the drawing
CELL = 20
MAX_LABEL = 11  # characters


def html_page(facts: ReportFacts) -> str:
    """The report as HTML."""
    parts = {
        "title": _text(facts.title),
        "status": f'<p class="status {facts.status}">{_text(facts.status_text)}</p>',
        "progress": _progress(facts),
        "result": _result(facts),
        "curves": _curves(facts),
        "samples": _samples(facts),
        "model": _table(facts.model),
        "speed": _table(facts.speed),
        "data": _table(facts.data),
        "attention": _attention(facts.attention),
        "config": _table(facts.config),
        "machine": _table(facts.machine),
        "style": _page_files(STYLES),
        "script": _page_files(SCRIPTS),
    }
    page = (FOLDER / "run_report.html").read_text("utf-8")
    # In one pass, so that inserted text is not searched.
    return re.sub(r"<!--(\w+)-->", lambda match: parts[match[1]], page)


@cache
def _page_files(names: tuple[str, ...]) -> str:
    """The text of these files of the page, one after the other."""
    text = ""
    for name in names:
        text += (FOLDER / name).read_text("utf-8")
    return text


def _text(text: str) -> str:
    """Escape a text. Control characters become visible, and half characters become ?."""
    whole = text.encode("utf-8", "replace").decode()
    return html.escape(visible(whole))


def _progress(facts: ReportFacts) -> str:
    if facts.status != RUNNING:
        return ""
    return f'<progress value="{facts.progress:.4f}" aria-label="share of the run that is done">'


def _result(facts: ReportFacts) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in [*facts.result, *facts.assessment])
    numbers = ""
    for name, value in facts.key_numbers:
        numbers += f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
    text = f'<dl class="numbers">{numbers}</dl><ul class="lines">{lines}</ul>'
    for advice in facts.advice:
        text += f'<p class="banner"><b>Advice:</b> {_text(advice)}</p>'
    for command in facts.next_commands:
        purpose, _, line = command.partition(": ")
        text += f"<p>{_text(purpose.capitalize())}:</p><pre>{_text(line)}</pre>"
    words = facts.words
    return f"{text}<details><summary>{_text(words.title)}</summary>{_table(words)}</details>"


def _table(table: Table) -> str:
    """A table, which scrolls if it is wider than the page."""
    head = ""
    if table.columns:
        cells = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.columns)
        head = f"<thead><tr>{cells}</tr></thead>"
    rows = ""
    for first, *others in table.rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        rows += f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>\n'
    kind = "wide" if table.columns else "pairs"
    note = f'<p class="quiet">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" role="region" aria-label="{_text(table.title)} (table)" tabindex="0">'
        f'<table class="{kind}">{head}<tbody>\n{rows}</tbody></table></div>{note}'
    )


# ---------------------------------------------------------------- losses


def _curves(facts: ReportFacts) -> str:
    if facts.curves is None:
        return "<p>No step has been logged yet.</p>"
    text = _chart(facts.curves) + _legend(facts.curves)
    if facts.evaluations.rows:
        name = _text(facts.evaluations.title)
        text += f"<details><summary>{name}</summary>{_table(facts.evaluations)}</details>"
    return text


def _chart(chart: LossCurves) -> str:
    """Lines in an SVG that is stretched to the width of the page, and labels beside it."""
    lines = ""
    labels = ""
    for tick in chart.loss_ticks():
        top = chart.y(tick)
        lines += _line("grid", 0, top, 1, top)
        labels += f'<span class="y" style="top:{top:.2%}">{tick:g}</span>'
    for tick in chart.step_ticks():
        left = chart.x(tick)
        lines += _line("grid", left, 0, left, 1)
        labels += f'<span class="x" style="left:{left:.2%}">{tick:,.0f}</span>'
    for level in chart.levels:
        top = chart.y(level.loss)
        lines += _line(f"level {level.kind}", 0, top, 1, top)
    for curve in chart.curves:
        lines += _curve(chart, curve)
    return f"""<div class="chart" id="chart">
<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img"
 aria-label="losses by step; the table below has the numbers">{lines}</svg>
{labels}<div class="cross" id="cross" hidden></div><div class="tip" id="tip" hidden></div>
</div>
<p class="axis quiet">step → · loss in nats per token{_scale(chart)}</p>
{_data_block(chart)}"""


def _scale(chart: LossCurves) -> str:
    return ", on a logarithmic scale" if chart.is_log else ""


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" d="M{_place(x1, y1)}L{_place(x2, y2)}"/>'


def _place(x: float, y: float) -> str:
    return f"{x * SIDE:.1f} {y * SIDE:.1f}"


def _curve(chart: LossCurves, curve: Curve) -> str:
    places = [_place(chart.x(step), chart.y(loss)) for step, loss in curve.points]
    text = f'<path class="curve {curve.kind}" d="M{"L".join(places)}"/>'
    if curve.kind != "train" or len(places) == 1:
        dots = "".join(f"M{place}h0" for place in places)  # round ends make them dots
        text += f'<path class="dots {curve.kind}" d="{dots}"/>'
    return text


def _legend(chart: LossCurves) -> str:
    items = ""
    for curve in chart.curves:
        last = curve.points[-1]
        items += f'<li><i class="{curve.kind}"></i>{_text(curve.name)} <b>{last.loss:.3f}</b></li>'
    for level in chart.levels:
        name = _text(level.name)
        items += f'<li><i class="level {level.kind}"></i>{name} <b>{level.loss:.3f}</b></li>'
    return f'<ul class="legend">{items}</ul>'


def _data_block(chart: LossCurves) -> str:
    """What the script shows under the pointer, as an element that a browser does not run."""
    curves = []
    for curve in chart.curves:
        points = [[step, round(loss, 5)] for step, loss in curve.points]
        curves.append({"name": visible(curve.name), "points": points})
    facts = {"first": chart.first_step, "last": chart.last_step, "curves": curves}
    return f'<script type="application/json" id="losses">{_json(facts)}</script>'


def _json(value: Any) -> str:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # json.dumps() escapes characters outside ASCII. These could close the element.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# ---------------------------------------------------------------- samples and attention


def _samples(facts: ReportFacts) -> str:
    if not facts.samples:
        return (
            "<p>There are no samples; <code>train.sample_every</code> says when to take them.</p>"
        )
    text = ""
    for sample in facts.samples:
        prompt = f"<b>{_text(sample['prompt'])}</b>" if sample["prompt"] else ""
        text += f'<h3>Step {sample["step"]:,}</h3><pre dir="auto">{prompt}{_text(sample["text"])}'
        text += "</pre>"
    if facts.n_samples > len(facts.samples):
        shown = f"{len(facts.samples)} of {facts.n_samples:,} samples"
        text += f'<p class="quiet">{shown}; all are in samples.jsonl.</p>'
    return text


def _attention(picture: AttentionPicture | str) -> str:
    if isinstance(picture, str):
        return f"<p>{_text(picture)}</p>"
    rows = []
    for layer, shares in enumerate(picture.shares()):
        rows.append([str(layer), *[f"{share:.0%}" for share in shares]])
    columns = ["layer", "previous token", "first token", "itself"]
    table = Table("mean attention by layer", columns, rows)
    return f"""<p>The start of the validation text: how much each token (a row) reads from
itself and the tokens before it (columns), as a mean over all heads. Point at a cell for the
number.</p>
<div class="pictures"><div>{_large_picture(picture)}</div>
<div>{_heads(picture)}{_table(table)}</div></div>"""


def _large_picture(picture: AttentionPicture) -> str:
    """The mean over all heads, one square per pair of tokens that is not 0."""
    labels = picture.labels
    names = [label if len(label) <= MAX_LABEL else f"{label[:MAX_LABEL]}…" for label in labels]
    size = LABEL_WIDTH + CELL * len(labels)
    text = ""
    for query, row in enumerate(picture.mean.tolist()):
        top = query * CELL
        middle = top + 0.7 * CELL
        text += f'<text x="{LABEL_WIDTH - 6}" y="{middle:g}">{_text(names[query])}</text>'
        for key, weight in enumerate(row):
            if not weight > 0:
                continue
            left = LABEL_WIDTH + key * CELL
            title = f"{labels[query]} reads {weight:.1%} from {labels[key]}"
            text += f'<rect x="{left}" y="{top}" width="{CELL - 1}" height="{CELL - 1}"'
            text += (
                f' fill-opacity="{min(1, weight) ** 0.5:.3f}"><title>{_text(title)}</title></rect>'
            )
    return (
        f'<svg class="large" viewBox="0 0 {size} {CELL * len(labels)}" role="img" '
        f'aria-label="mean attention between the tokens">{text}</svg>'
    )


def _heads(picture: AttentionPicture) -> str:
    """One small image per head, a row per layer."""
    n_layers, n_heads = picture.weights.shape[:2]
    layers = spread(range(n_layers), MAX_SIDE)
    heads = spread(range(n_heads), MAX_SIDE)
    images = ""
    for layer in layers:
        images += "".join(_head(picture, layer, head) for head in heads)
    note = "Each head: a row per layer, from the first to the last."
    if len(layers) < n_layers or len(heads) < n_heads:
        note = f"{len(layers)} of {n_layers} layers (rows) and {len(heads)} of {n_heads} heads."
    style = f"grid-template-columns: repeat({len(heads)}, minmax(0, 48px))"
    return f'<p class="quiet">{note}</p><div class="heads" style="{style}">{images}</div>'


def _head(picture: AttentionPicture, layer: int, head: int) -> str:
    weights = picture.weights[layer, head]
    name = f"layer {layer}, head {head}"
    if weights.isnan().any():
        return f'<span title="{name}: pruned"></span>'
    image = base64.b64encode(transparent_png(weights)).decode("ascii")
    return f'<img alt="{name}" title="{name}" src="data:image/png;base64,{image}">'
