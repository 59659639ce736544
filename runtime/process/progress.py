"""Progress bars that become whole lines in a file.

On a terminal and in a notebook, a bar is drawn over itself. In a log, a pipe or the file of nohup,
that would make one endless line.
"""

import io
import sys
from typing import Any, TextIO

from tqdm import tqdm

# Lines of a bar with a known end: after these percentages, at least so many seconds apart, and when
# it is closed.
PERCENTAGES = (1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90)
MIN_SECONDS = 1.0
# Lines of any bar that takes long: after so many seconds, then whenever three times as many have
# passed, and after this time without a line.
FIRST_SECONDS = 10.0
GROWTH = 3.0
MAX_SECONDS = 600.0


def draws_over_itself(stream: TextIO) -> bool:
    """Whether a carriage return lets a line be replaced: on a terminal and in a notebook."""
    if type(stream).__module__.partition(".")[0] == "ipykernel":
        return True
    return stream.isatty()


def passed_percentages(share: float) -> int:
    """How many of PERCENTAGES a bar has passed when this share of it is done."""
    # Rounded, as shares are sums: 0.1 + 0.2 passes 30%.
    percentage = round(100 * share, 6)
    return sum(percentage >= passed for passed in PERCENTAGES)


def is_slow(elapsed: float, last: float) -> bool:
    """Whether a bar has been without a line for long: `elapsed` seconds after its start, and `last`
    of the last line (0: none)."""
    return elapsed >= max(FIRST_SECONDS, GROWTH * last) or elapsed - last >= MAX_SECONDS


class Progress(tqdm):
    """The progress bar of all commands: tqdm's, but whole lines where a bar cannot be drawn.

    A bar that leaves nothing behind (leave=False) writes lines only if it takes long. Arguments and
    methods are those of tqdm.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stderr
        self.log: TextIO | None = None  # where lines go; None: draw a bar
        if stream is not None and not draws_over_itself(stream):
            self.log = stream
            options["file"] = io.StringIO()  # tqdm writes nothing there, except as it closes
        self.n_passed = 0  # percentages
        self.last_line = 0.0  # seconds after the start
        self.last_text = ""
        super().__init__(*args, **options)
        self.n_passed = self._count_passed()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draw the bar, or write a line if one is due."""
        if self.log is None:
            return super().display(msg, pos)
        if self._is_line_due():
            self._write_line()
        return True

    def close(self) -> None:
        """End the bar. Its last state stays, unless leave=False."""
        is_open = not getattr(self, "disable", True)  # without it, __init__() has failed
        was_shown = is_open and self.last_print_t >= self.start_t + self.delay
        if self.log is not None and was_shown and self.leave:
            self._write_line()
        super().close()

    def show_status(self, text: str) -> None:
        """Show at once what is being done, in place of the postfix. Lines keep their postfix, as
        few of them are written."""
        if self.log is None:
            self.set_postfix_str(text)

    def _is_line_due(self) -> bool:
        elapsed = self.format_dict["elapsed"]
        if is_slow(elapsed, self.last_line):
            return True
        if not self.leave or elapsed - self.last_line < MIN_SECONDS:
            return False
        is_done = self.total is not None and self.n >= self.total  # close() writes the last line
        return not is_done and self._count_passed() > self.n_passed

    def _count_passed(self) -> int:
        total = getattr(self, "total", None)
        if not total:
            return 0
        return passed_percentages(self.n / total)

    def _write_line(self) -> None:
        values = self.format_dict
        if values["bar_format"] is None:
            values["ncols"] = 0  # no bar within the line
        else:
            values["bar_format"] = values["bar_format"].replace("|{bar}|", "")
        text = self.format_meter(**values).strip()
        if text == self.last_text:
            return
        self.log.write(f"{text}\n")
        self.log.flush()
        self.last_text = text
        self.last_line = self.format_dict["elapsed"]
        self.n_passed = self._count_passed()
