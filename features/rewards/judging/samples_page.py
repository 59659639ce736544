"""A page of answers with their rewards, of one model or of several side by side."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinker.features.rewards.judging.judge_model import Judged, mean_reward
from thinker.runtime.process.standard_streams import visible

MAX_PROMPTS = 50  # nobody reads a longer page
STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --bad: #b3391f; }
@media (prefers-color-scheme: dark) { :root { --good: #56c272; --bad: #ff8a70; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top; border: 1px solid #8886; }
.answer { margin: 0 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.reward { font-variant-numeric: tabular-nums; font-weight: 600; margin-right: .5rem; }
.good { color: var(--good); }
.bad { color: var(--bad); }
h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dt { float: left; clear: left; width: 8rem; opacity: .7; }
dd { margin-left: 8rem; }
"""


def write_page(path: Path, header: Mapping[str, Any], judged: Sequence[tuple[str, Judged]]) -> None:
    """Write one HTML file without external parts."""
    path.write_text(page(header, judged), encoding="utf-8")


def page(header: Mapping[str, Any], judged: Sequence[tuple[str, Judged]]) -> str:
    """The page: each prompt with the answers of each model."""
    facts = ""
    for name, value in header.items():
        if value is not None:
            facts += f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n"
    _, first = judged[0]
    n_shown = min(len(first.prompts), MAX_PROMPTS)
    head = "".join(_column_title(name, each) for name, each in judged)
    sections = []
    for number in range(n_shown):
        cells = "".join(_answers(each, number) for _, each in judged)
        title = f"<h2>{_text(first.prompts[number].text)}</h2>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"
        sections.append(f"{title}\n{table}")
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Answers and rewards</title><style>{STYLE}</style>",
        f"<main><h1>Answers and rewards</h1><dl>{facts}</dl>",
        f"<p>The first {n_shown:,} of {len(first.prompts):,} prompts. Each reward is followed "
        "by its answer.</p>",
        *sections,
        "</main></html>",
    ]
    return "\n".join(parts)


def _column_title(name: str, judged: Judged) -> str:
    reward = mean_reward(judged.totals)
    shown = "no reward" if reward is None else f"mean reward {reward:.3f}"
    return f'<th scope="col">{_text(name)}, {shown}</th>'


def _answers(judged: Judged, number: int) -> str:
    """The cell with all answers of a model to a prompt."""
    rows = ""
    for answer, total in zip(judged.answers[number], judged.totals[number].tolist()):
        kind = "good" if total >= judged.right else "bad"
        shown = "no reward" if np.isnan(total) else f"{total:.3g}"
        reward = f'<span class="reward {kind}">{shown}</span>'
        rows += f'<p class="answer">{reward}{_text(answer.text)}</p>'
    return f"<td>{rows}</td>"


def _text(value: object) -> str:
    """Escape a text. Control characters become visible, and half characters become ?."""
    whole = str(value).encode("utf-8", "replace").decode()
    return html.escape(visible(whole))
