"""A report of each run as a page and as Markdown, written while it trains."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="run_report",
    keys={"train": "thinker.features.run_report.keys:ReportKeys"},
    callbacks="thinker.features.run_report.run_report:run_reports",
)
