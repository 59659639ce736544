"""Logging to TensorBoard: event files in the folder tensorboard/ of the run directory."""

import struct
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings
from thinker.training.tracking.tracker import TrackedRun, Tracker, require_package

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoardTracker(Tracker):
    """Writes an event per step.

    A run that resumes writes a new file, whose first event purges the steps that are logged again:
    readers drop them from the files before. The step of an event is complete, as all its numbers
    are in one record; and on the disk, as it is flushed.
    """

    def __init__(self, settings: Settings) -> None:
        require_package("tensorboard", "tracking.trackers=tensorboard")

    def start(self, run: TrackedRun) -> int:
        """Open a new event file, which purges the steps that the files before lack and those from
        `run.step` on."""
        from torch.utils.tensorboard import SummaryWriter

        from thinker.training.tracking.tensorboard_log import event_files, last_scalar_step

        folder = run.directory / "tensorboard"
        last_step = min(last_scalar_step(folder), run.step - 1)
        files = event_files(folder)
        self.step = run.step
        if files:
            _wait_for_a_later_name(files[-1])
        self.writer = SummaryWriter(str(folder), purge_step=last_step + 1)
        config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        self._add_text("config", config, run.step)
        self.writer.flush()
        return last_step

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Add a sample to the texts."""
        self._add_text("sample", prompt + text, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step to the scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            scalars = [Summary.Value(tag=key, simple_value=values[key]) for key in values]
            self._add(Summary(value=scalars), step)
            self.step = step

    def summary(self, summary: RunSummary) -> None:
        """Add what is said of the result to the texts."""
        lines = [*summary.result, *summary.assessment, *summary.advice]
        self._add_text("summary", "\n".join(lines), self.step)

    def picture(self, path: Path) -> None:
        """Add a picture to the images."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])  # where a PNG file has them
        image = Summary.Image(
            height=height, width=width, colorspace=4, encoded_image_string=content
        )
        self._add(Summary(value=[Summary.Value(tag=path.stem, image=image)]), self.step)

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()

    def _add(self, summary: "Summary", step: int) -> None:
        self.writer.file_writer.add_summary(summary, step)
        self.writer.flush()

    def _add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text that the page shows as it is, as Markdown shows an indented one."""
        self.writer.add_text(tag, textwrap.indent(text, "    ", lambda line: True), step)


def _wait_for_a_later_name(newest: Path) -> None:
    """Wait until the second that a file's name begins with is over, as readers sort by name."""
    second = newest.name.removeprefix("events.out.tfevents.").partition(".")[0]
    while second == f"{int(time.time()):010d}":
        time.sleep(0.05)
