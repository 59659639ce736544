"""The key of the report of a run."""

from thinker.training.config.types import ConfigSection


class ReportKeys(ConfigSection):
    """Keys of the section `train`."""

    report: bool = True
    """Write a report of the run, as a page and as Markdown, at each evaluation and at the end
    (features/run_report/guide.md)."""
