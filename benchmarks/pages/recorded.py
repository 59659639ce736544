"""Recorded results, and tables made from them."""

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError

Record = dict[str, Any]
Results = dict[str, list[Record]]  # by the name of the file, without its suffix
LIBRARIES = ("torch", "tiktoken", "tokenizers", "litgpt", "litdata")
WIDTH = 112  # of lines of text
MINUS = re.compile(r"(?<![\w-])-(?=\d)")  # the sign of a number


def load_results(folder: Path) -> Results:
    """Load all results of a folder. Each gets the name of its file as `file_name`."""
    return {path.stem: load_records(path) for path in sorted(folder.glob("*.json*"))}


def load_records(path: Path) -> list[Record]:
    """Load the results of one file: a line each, or one on many lines."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if lines[0] == "{":
        lines = [text]
    # The rows of recorded.jsonl are shown as they are, with their digits: 0.540 stays "0.540".
    parse_float = str if path.stem == "recorded" else float
    environment = None
    records = []
    for line in lines:
        record = json.loads(line, parse_float=parse_float)
        if record.get("name") == "environment":
            environment = record  # the GPU benchmark writes it once, before its results
        record.setdefault("environment", environment)
        record["file_name"] = path.name
        records.append(record)
    return records


@dataclass
class Table:
    """Rows of cells under headings, the results that they come from, and notes about them."""

    headings: tuple[str, ...]
    sources: list[Record]
    notes: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row with a cell for each heading."""
        assert len(cells) == len(self.headings), cells
        self.rows.append([str(cell).replace("|", r"\|") for cell in cells])

    def markdown(self) -> str:
        """The table in Markdown, then its notes, then a line on machine, date and file."""
        blocks = []
        if self.rows:
            lines = [markdown_row(self.headings), "|" + "---|" * len(self.headings)]
            lines += [markdown_row(row) for row in self.rows]
            blocks.append("\n".join(lines))
        notes = list(self.notes)
        if self.sources:
            notes.append(self.origin())
        for text in notes:
            blocks.append(
                textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
            )
        return "\n\n".join(blocks)

    def origin(self) -> str:
        """The machines with their dates, and the files of the results."""
        dates: dict[str, list[str]] = {}
        for source in self.sources:
            machine, date = describe_environment(source["environment"])
            dates.setdefault(machine, []).append(date)
        machines = [f"{name}, {' and '.join(unique(days))}" for name, days in dates.items()]
        files = [f"`{source['file_name']}`" for source in self.sources]
        return f"*{'; '.join(machines)}: {', '.join(unique(files))}*"


def rows_table(sources: list[Record], rows: Iterable[Record], columns: dict[str, str]) -> Table:
    """A table with a row for each of `rows`.

    `columns` has a template for each heading, such as "{loss:.3f} ± {spread:.3f}". A cell is empty
    if the row lacks a value.
    """
    table = Table(tuple(columns), sources)
    for row in rows:
        table.add(*(fill(template, row) for template in columns.values()))
    return table


def fill(template: str, row: Record) -> str:
    """The template with the values of a row, or nothing if one is missing."""
    try:
        text = template.format_map(row)
    except KeyError:
        return ""
    return MINUS.sub("−", text)


def markdown_row(cells: list[str] | tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def unique(texts: list[str]) -> list[str]:
    """The texts in their order, each once."""
    return list(dict.fromkeys(texts))


def describe_environment(environment: Record) -> tuple[str, str]:
    """The machine with the versions of libraries, and the date."""
    words = [describe_machine(environment)]
    for library in LIBRARIES:
        if library in environment:
            words.append(f"{library} {environment[library]}")
    if "date" in environment:
        date = environment["date"]
    else:
        date = f"recorded {environment['recorded']}"  # the date of the commit
    return ", ".join(words), date


def describe_machine(environment: Record) -> str:
    """The GPU, or the processor and its threads."""
    processor = environment["processor"]
    if processor.startswith("none"):
        return "counted without a GPU"
    if environment.get("gpu", "none") != "none":
        return environment["gpu"]
    name = processor.replace("(R)", "").replace(" Processor", "").replace("GHz", " GHz")
    if "features" in environment:
        name += f" with {environment['features']}"
    threads = environment["threads"]
    if threads == "1":
        return f"{name}, 1 thread"
    return f"{name}, {threads} threads"


def recorded_table(results: Results, name: str) -> Table:
    """The lines of recorded.jsonl with this name as one table, and their notes."""
    sources = [record for record in results["recorded"] if record["name"] == name]
    if not sources:
        raise UserError(f"page_tables.py and results/recorded.jsonl have no table {name!r}")
    headings = tuple(sources[0].get("rows", [{}])[0])
    table = Table(headings, sources)
    for source in sources:
        for row in source.get("rows", []):
            table.add(*(as_recorded(row[heading]) for heading in headings))
        table.notes += source.get("notes", [])
    return table


# Numbers as text


def as_recorded(value: object) -> str:
    """A recorded value; whole numbers from 10,000 on get commas."""
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)


def signed_percent(share: float) -> str:
    """A share in percent with its sign."""
    return f"{share:+.1%}".replace("-", "−")


def with_interval(value: float, interval: float, digits: int) -> str:
    """A difference and its interval."""
    return f"{value:+.{digits}f} ± {interval:.{digits}f}".replace("-", "−")
