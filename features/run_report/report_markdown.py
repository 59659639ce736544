"""A report as Markdown that GitHub renders, without HTML."""

import re

from thinker.features.run_report.attention_picture import AttentionPicture
from thinker.features.run_report.loss_curves import LossCurves
from thinker.features.run_report.report_facts import FINISHED, ReportFacts, Table
from thinker.runtime.process.standard_streams import visible

SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$&])")


def markdown_page(facts: ReportFacts) -> str:
    """The report as Markdown."""
    blocks = [f"# {_text(facts.title)}", _text(facts.status_text), "## Result"]
    blocks += _result(facts)
    blocks += ["## Loss"]
    if facts.curves is None:
        blocks.append("No step has been logged yet.")
    else:
        blocks.append(_levels(facts.curves))
    if facts.evaluations.rows:
        blocks += _table(facts.evaluations)
    if facts.status == FINISHED:
        blocks.append("![loss by step](loss.png)")
    for table in (facts.model, facts.speed):
        blocks += [f"## {_text(table.title)}", *_table(table)]
    blocks += ["## Samples over time", *_samples(facts)]
    blocks += ["## Data", *_table(facts.data)]
    blocks += ["## Attention", *_attention(facts.attention)]
    blocks += ["## Settings that differ from the defaults", *_table(facts.config)]
    blocks += ["## Versions and machine", *_table(facts.machine)]
    blocks += [f"## {_text(facts.words.title)}", *_table(facts.words)]
    return "\n\n".join(blocks) + "\n"


def _text(text: str) -> str:
    """A text on one line, in which nothing means anything to Markdown."""
    whole = text.encode("utf-8", "replace").decode()
    return SPECIAL.sub(r"\\\1", " ".join(visible(whole).split()))


def _code(text: str) -> str:
    """A block of code that holds the text as it is, whatever backticks it has."""
    whole = visible(text.encode("utf-8", "replace").decode())
    longest = max(map(len, re.findall("`+", whole)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{whole}\n{fence}"


def _result(facts: ReportFacts) -> list[str]:
    lines = [f"- {_text(line)}" for line in [*facts.result, *facts.assessment]]
    blocks = [*_table(Table("", ["number", "value"], facts.key_numbers)), "\n".join(lines)]
    blocks += [f"> **Advice:** {_text(advice)}" for advice in facts.advice]
    for command in facts.next_commands:
        purpose, _, line = command.partition(": ")
        blocks += [f"{_text(purpose.capitalize())}:", _code(line)]
    return blocks


def _levels(curves: LossCurves) -> str:
    """The newest value of each curve, and what to compare them with."""
    rows = [[curve.name, f"{curve.points[-1].loss:.4f}"] for curve in curves.curves]
    rows += [[level.name, f"{level.loss:.4f}"] for level in curves.levels]
    return "\n\n".join(_table(Table("", ["loss", "nats per token"], rows)))


def _table(table: Table) -> list[str]:
    """A table, and its note."""
    columns = table.columns or [""] * len(table.rows[0])
    align = [":--", *["--:"] * (len(columns) - 1)] if table.columns else [":--"] * len(columns)
    lines = [_row(columns), f"| {' | '.join(align)} |", *map(_row, table.rows)]
    blocks = ["\n".join(lines)]
    if table.note:
        blocks.append(_text(table.note))
    return blocks


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _samples(facts: ReportFacts) -> list[str]:
    if not facts.samples:
        return ["There are no samples; `train.sample_every` says when to take them."]
    blocks = []
    for sample in facts.samples:
        blocks += [f"Step {sample['step']:,}:", _code(sample["prompt"] + sample["text"])]
    if facts.n_samples > len(facts.samples):
        shown = f"{len(facts.samples)} of {facts.n_samples:,} samples"
        blocks.append(f"{shown}; all are in samples.jsonl.")
    return blocks


def _attention(picture: AttentionPicture | str) -> list[str]:
    if isinstance(picture, str):
        return [_text(picture)]
    rows = []
    for layer, shares in enumerate(picture.shares()):
        rows.append([str(layer), *[f"{share:.0%}" for share in shares]])
    columns = ["layer", "previous token", "first token", "itself"]
    note = "Mean attention on the start of the validation text. report.html has a picture."
    return _table(Table("", columns, rows, note))
