"""Write the tables of the pages on benchmarks from the recorded results.

These are docs/benchmarks.md, the pages of docs/benchmarks/ and one of docs/explanations/. Their
text is written by hand. Each table stands between two comments and is written anew:

    <!-- table: loading -->
    <!-- end -->

`page_tables.py` has a function for each table of a benchmark. Other names are those of lines in
`results/recorded.jsonl`, which hold rows as they are shown.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from thinker.benchmarks.pages.page_tables import GPU_CURVES, TABLES
from thinker.benchmarks.pages.recorded import Results, load_results, recorded_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
TABLE = re.compile(r"(?ms)^<!-- table: (\S+) -->$(.*?)^<!-- end -->$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has no flags."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the tables of all pages, and the curves of a GPU. Returns what changed."""
    results = load_results(RESULTS)
    changed = []
    for path in benchmark_pages():
        text = path.read_text(encoding="utf-8")
        new_text = with_tables(text, results)
        if new_text != text:
            path.write_text(new_text, encoding="utf-8")
            changed.append(str(path.relative_to(DOCS)))
    if "gpu_time_to_loss" in results:
        from thinker.benchmarks.gpu.gpu_time_to_loss import plot_curves

        path = (DOCS / "benchmarks" / GPU_CURVES).resolve()
        plot_curves(results["gpu_time_to_loss"], path)
        changed.append(str(path.relative_to(DOCS)))
    return {"changed": changed}


def benchmark_pages() -> list[Path]:
    """The pages with generated tables."""
    pages = [DOCS / "benchmarks.md", *sorted((DOCS / "benchmarks").glob("*.md"))]
    return [*pages, DOCS / "explanations" / "accumulation.md"]


def table_names(text: str) -> list[str]:
    """The names of the tables of a page, in its order."""
    return [match[1] for match in TABLE.finditer(text)]


def with_tables(text: str, results: Results) -> str:
    """The text of a page with its tables made from these results."""

    def write(match: re.Match[str]) -> str:
        name = match[1]
        if name in TABLES:
            table = TABLES[name](results)
        else:
            table = recorded_table(results, name)
        return f"<!-- table: {name} -->\n\n{table.markdown()}\n\n<!-- end -->"

    return TABLE.sub(write, text)
