"""The HTML page of a data report: the table, the plot, and the sequences of a step with borders and
masks."""

import base64
import html
import io
from pathlib import Path

from thinker.training.reports.data_report import DataReport, Sequence, plot_lengths, table

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
td:first-child { text-align: left; }
tr:first-child { font-weight: bold; }
img { max-width: 100%; background: white; }
.sequence { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid #8888; padding: .5rem; }
.d0 { background: color-mix(in srgb, #2f6db3 18%, transparent); }
.d1 { background: color-mix(in srgb, #d9662b 18%, transparent); }
.bos { outline: 1px solid; font-size: .75em; padding: 0 .2em; }
.masked { opacity: .45; }
.padding { opacity: .25; font-size: .6em; }
"""


def write_page(report: DataReport, path: Path) -> None:
    """Write one HTML file without external parts."""
    path.write_text(page(report), encoding="utf-8")


def page(report: DataReport) -> str:
    """The page. Colors alternate between the documents of a sequence."""
    plot = io.BytesIO()
    plot_lengths(report, plot)
    image = base64.b64encode(plot.getvalue()).decode()
    rows = ""
    for row in table(report):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        rows += f"<tr>{cells}</tr>"
    legend = (
        "BOS marks the start of a document. The color alternates between documents. The "
        "prediction after a pale token does not count in the loss. Small dots are padding."
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
        "content='width=device-width'>",
        f"<title>Training data</title><style>{STYLE}</style><h1>Training "
        f"data</h1><table>{rows}</table>",
        "<h2>Lengths of the documents</h2>",
        f"<img alt='Histogram of the lengths of the documents' "
        f"src='data:image/png;base64,{image}'>",
        f"<h2>Sequences of step {report.step}</h2><p>{legend}</p>",
        *map(_sequence, report.sequences),
        "</html>",
    ]
    return "\n".join(parts)


def _sequence(sequence: Sequence) -> str:
    name = html.escape(sequence.source)
    where = f"{name}, sequence {sequence.sample_id:,}, epoch {sequence.epoch:.2f}"
    spans = []
    for text, document, kind in sequence.tokens:
        shown = {"bos": "BOS", "padding": "·"}.get(kind) or html.escape(text)
        spans.append(f"<span class='d{document % 2} {kind}'>{shown}</span>")
    return f"<h3>{where}</h3><div class=sequence>{''.join(spans)}</div>"
