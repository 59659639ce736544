"""The callback that feeds the trackers of a run."""

from collections.abc import Mapping, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

from thinker.training.callback import Callback, TrainingRun
from thinker.training.reports.run_summary import RunSummary
from thinker.training.tracking.tracker import TrackedRun, Tracker


class Tracking(Callback):
    """Feeds trackers on rank 0. Each gets every step once, in order.

    A step may have several lines in metrics.jsonl, and a sample. So the newest step is kept until a
    later one begins or the run ends. If a signal interrupts the evaluation of the last step, that
    step is not sent: the run that resumes finds it in metrics.jsonl, and completes it.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.last_steps: list[int] = []  # that the trackers have
        # The newest step.
        self.step = -1
        self.values: dict[str, float] = {}
        self.samples: list[tuple[str, str]] = []  # prompts and texts

    def on_start(self, run: TrainingRun) -> None:
        """Start the trackers, and send them what they miss of metrics.jsonl and samples.jsonl,
        which must end at the step that training resumes from."""
        self.run = run
        if not run.directory.writes:
            self.trackers = []
        settings = run.parts.settings
        tracked = TrackedRun(
            directory=run.directory.path,
            name=settings.tracking.name or run.directory.path.name,
            config=settings.model_dump(mode="json"),
            step=run.state.step,
        )
        self.last_steps = [tracker.start(tracked) for tracker in self.trackers]
        by_step = itemgetter("step")
        for line in merge(run.directory.read_metrics(), run.directory.read_samples(), key=by_step):
            if "prompt" in line:
                self.on_sample(**line)
            else:
                self.on_log(line)

    def on_log(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl to its step."""
        values = dict(line)
        self._begin(values.pop("step"))
        self.values |= values

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a sample to its step."""
        self._begin(step)
        self.samples.append((prompt, text))

    def on_summary(self, summary: RunSummary) -> None:
        """Send the last step, the summary and the pictures of the finished run."""
        self._send()
        pictures = sorted(self.run.directory.path.glob("*.png"))
        for tracker in self.trackers:
            tracker.summary(summary)
            for path in pictures:
                tracker.picture(path)

    def on_end(self, is_evaluated: bool) -> None:
        """End the trackers. Sends the newest step only if it has its evaluation."""
        if is_evaluated:
            self._send()
        for tracker in self.trackers:
            tracker.finish()

    def _begin(self, step: int) -> None:
        if step != self.step:
            self._send()
            self.step = step

    def _send(self) -> None:
        """Send the newest step to the trackers that do not have it."""
        for index, tracker in enumerate(self.trackers):
            if self.step <= self.last_steps[index]:
                continue
            for prompt, text in self.samples:
                tracker.sample(self.step, prompt, text)
            tracker.log(self.step, self.values)
            self.last_steps[index] = self.step
        self.values = {}
        self.samples = []
