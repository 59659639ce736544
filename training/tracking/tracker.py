"""What a tracker is: where the metrics of a run go, in addition to metrics.jsonl."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError, install_command
from thinker.training.reports.run_summary import RunSummary


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows."""

    directory: Path
    name: str  # tracking.name, or the name of the directory
    config: dict[str, Any]  # the settings of the run, as JSON values
    step: int  # that training goes on from; 0 for a new run


class Tracker:
    """Takes what a run logs. Its methods do nothing here; a tracker overrides those that it needs.

    Only rank 0 calls them. A tracker gets each step once, in order, when the step is complete: its
    samples, then log() with its numbers. A run that was killed goes on from its last checkpoint
    and repeats steps. start() says which steps the tracker still has; it gets the others again.
    """

    def start(self, run: TrackedRun) -> int:
        """The run starts or resumes. Returns the last step that the tracker has; -1 for none.

        It gets all later steps that metrics.jsonl has, then those to come. Steps before `run.step`
        never change. Those from `run.step` on are logged again, with the same losses and other
        times: remove them and return at most `run.step - 1`, or keep them and return the last one.
        Raises UserError if the tracker cannot start.
        """
        return -1

    def sample(self, step: int, prompt: str, text: str) -> None:
        """A sample during training: the prompt, and what the model wrote after it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step, by their keys in metrics.jsonl. Empty for a step that has only a
        sample."""

    def summary(self, summary: RunSummary) -> None:
        """The run is finished. A finished run that is started again comes here again."""

    def picture(self, path: Path) -> None:
        """A picture that the finished run has drawn, a PNG file such as loss.png. After
        summary()."""

    def finish(self) -> None:
        """The run ends or pauses, except when it is killed."""


def require_package(name: str, key: str) -> None:
    """Raise UserError if a package is not installed. key: what in the config needs it. The
    extra that installs it has its name."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise UserError(
            f"{key} needs the package {name}, which is not installed; run {install_command(name)}, "
            f"or remove {key}"
        )
