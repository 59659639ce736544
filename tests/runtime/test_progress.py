"""Progress bars: whole lines in a file, tqdm's own bars on a terminal and in a notebook."""

import ast
import io
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from pseudo_terminal import open_terminal
from tqdm import tqdm

from thinker.runtime.process import progress
from thinker.runtime.process.progress import PERCENTAGES, Progress, is_slow, passed_percentages


class Clock:
    """Seconds that pass when the test says so: the clock of a bar."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The clock of all bars that the test makes."""
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    return clock


def move(bar, clock, seconds, n=1):
    """Let time pass, then advance the bar."""
    clock.now += seconds
    bar.update(n)


def written(log):
    """The lines of a log, which has nothing but whole lines."""
    text = log.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    assert text == "" or text.endswith("\n")
    assert "\n\n" not in text
    return text.splitlines()


# ---------------------------------------------------------------- when a line is due


def test_percentages_are_passed_in_order():
    shares = [0, 0.0099, 0.01, 0.02, 0.0499, 0.05, 0.1, 0.2, 0.1 + 0.2, 0.89, 0.9, 1.0]
    assert [passed_percentages(share) for share in shares] == [
        0,
        0,
        1,
        2,
        2,
        3,
        4,
        5,
        6,
        11,
        12,
        12,
    ]


@given(st.lists(st.floats(0.1, 900), min_size=1, max_size=400))
def test_slow_bars_write_few_lines_and_are_never_silent_for_long(durations):
    elapsed = last = 0.0
    lines = []
    for duration in durations:
        elapsed += duration
        if is_slow(elapsed, last):
            lines.append(elapsed)
            last = elapsed
        assert elapsed - last < 600
    assert all(line >= 10 for line in lines)
    for before, after in pairwise(lines):
        assert after >= 3 * before or after - before >= 600


def test_a_bar_of_minutes_has_a_line_at_each_percentage(clock):
    log = io.StringIO()
    with Progress(total=1000, desc="work", file=log) as bar:
        for _ in range(1000):
            move(bar, clock, 0.25)
    shown = [int(re.match(r"work: +(\d+)%", line)[1]) for line in written(log)]
    assert shown == [1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert shown[:-1] == list(PERCENTAGES)


def test_a_bar_of_seconds_has_a_line_a_second_at_most(clock):
    log = io.StringIO()
    with Progress(total=1000, desc="work", file=log) as bar:
        for _ in range(1000):
            move(bar, clock, 0.003)
    assert len(written(log)) == 3
    assert written(log)[-1].startswith("work: 100% 1000/1000 [00:03<00:00")


def test_a_bar_of_hours_has_a_line_every_ten_minutes_at_least(clock):
    log = io.StringIO()
    with Progress(total=36_000, file=log) as bar:
        for _ in range(36_000):
            move(bar, clock, 1)
    assert 60 <= len(written(log)) <= 75


def test_a_bar_without_an_end_has_lines_at_growing_times(clock):
    log = io.StringIO()
    with Progress(desc="reading", unit="B", unit_scale=True, file=log) as bar:
        for _ in range(300):
            move(bar, clock, 1, 1000)
    assert [line.split()[1] for line in written(log)] == [
        "10.0kB",
        "30.0kB",
        "90.0kB",
        "270kB",
        "300kB",
    ]


def test_a_quick_bar_has_one_line(clock):
    log = io.StringIO()
    assert list(Progress(range(5), desc="quick", file=log)) == [0, 1, 2, 3, 4]
    assert len(written(log)) == 1
    assert written(log)[0].startswith("quick: 100% 5/5")


def test_the_end_has_one_line_which_says_when_it_was(clock):
    """As in training, whose last evaluation follows its last step."""
    log = io.StringIO()
    with Progress(total=2, desc="work", file=log) as bar:
        move(bar, clock, 2)
        move(bar, clock, 2)
        clock.now += 3
    assert [line.split(", ")[0] for line in written(log)] == [
        "work:  50% 1/2 [00:02<00:02", "work: 100% 2/2 [00:07<00:00"
    ]  # fmt: skip


# ---------------------------------------------------------------- what tqdm's options mean then


def test_a_bar_that_leaves_nothing_writes_only_if_it_is_slow(clock):
    for seconds, count in ((0.01, 0), (0.5, 2)):
        log = io.StringIO()
        with Progress(total=100, file=log, leave=False) as bar:
            for _ in range(100):
                move(bar, clock, seconds)
        assert len(written(log)) == count  # after 10 and 30 seconds


def test_a_bar_that_waits_to_be_shown_writes_nothing_before(clock):
    for seconds, is_shown in ((0.5, False), (4, True)):
        log = io.StringIO()
        with Progress(total=2, file=log, delay=5) as bar:
            move(bar, clock, seconds)
            move(bar, clock, seconds)
        assert bool(written(log)) == is_shown


def test_a_disabled_bar_writes_nothing(clock):
    log = io.StringIO()
    with Progress(total=2, file=log, disable=True) as bar:
        move(bar, clock, 100)
        bar.set_postfix_str("text")
        bar.show_status("text")
        bar.refresh()
    assert log.getvalue() == ""


def test_postfixes_come_with_the_next_line_and_statuses_never(clock):
    log = io.StringIO()
    form = "{percentage:3.0f}%|{bar}|{postfix} [{elapsed}<{remaining}]"
    with Progress(total=4, file=log, bar_format=form) as bar:
        bar.set_postfix_str("step 1", refresh=False)
        move(bar, clock, 5)
        bar.show_status("saving")
        bar.set_postfix_str("step 2")
        move(bar, clock, 5)
        bar.set_postfix(loss=0.5)
    assert written(log) == [
        "25%, step 1 [00:05<00:15]",
        "50%, step 2 [00:10<00:10]",
        "50%, loss=0.5 [00:10<00:10]",
    ]


def test_messages_and_nested_bars_keep_to_lines(clock, monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress(total=2, desc="outer") as outer:
        for _ in range(2):
            with Progress(total=3, desc="inner", leave=False) as inner:
                for _ in range(3):
                    move(inner, clock, 5)
                    Progress.write("message", file=sys.stderr)
                    inner.write("another", file=sys.stderr)
            move(outer, clock, 0)
    lines = written(log)
    assert lines.count("message") == lines.count("another") == 6
    others = [line.split(" [")[0] for line in lines if line not in ("message", "another")]
    assert others == [
        "inner:  67% 2/3", "outer:  50% 1/2", "inner:  67% 2/3", "outer: 100% 2/2"
    ]  # fmt: skip


def test_a_bar_that_an_error_ends_says_how_far_it_came(clock):
    log = io.StringIO()

    def fail():
        with Progress(total=10, file=log) as bar:
            move(bar, clock, 2)
            move(bar, clock, 0.1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [line.split()[0] for line in written(log)] == ["10%", "20%"]


def test_a_bar_can_go_on_from_the_middle(clock):
    log = io.StringIO()
    with Progress(total=100, initial=50, file=log) as bar:
        move(bar, clock, 2, 5)
        move(bar, clock, 2, 5)
    assert [line.split()[0] for line in written(log)] == ["60%"]


# ---------------------------------------------------------------- terminals and notebooks


def drive(kind, stream):
    """Everything that may be done with a bar."""
    form = "{desc}{percentage:3.0f}%|{bar}|{postfix} {n_fmt}"
    with kind(total=4, desc="bar", file=stream, bar_format=form, mininterval=0) as bar:
        for number in range(4):
            bar.set_postfix_str(f"step {number}")
            with kind(total=2, file=stream, bar_format=form, leave=False, mininterval=0) as inner:
                inner.update(1)
            kind.write("message", file=stream)
            bar.update(1)
    return stream.getvalue()


def test_a_terminal_shows_what_tqdm_shows():
    shown = drive(Progress, Terminal())
    assert shown == drive(tqdm, Terminal())
    assert "\r" in shown


def test_a_notebook_shows_what_tqdm_shows():
    """Its stream says that it is no terminal, but carriage returns work there."""
    stream = pytest.importorskip("ipykernel.iostream").OutStream
    kernel_stream = type("Shown", (io.StringIO,), {"__module__": stream.__module__})
    assert drive(Progress, kernel_stream()) == drive(tqdm, io.StringIO())


def test_a_status_is_shown_on_a_terminal():
    terminal = Terminal()
    with Progress(total=2, file=terminal) as bar:
        bar.show_status("saving")
    assert ", saving]" in terminal.getvalue()


TRAIN = """
import sys
from thinker.runtime.process.progress import Progress
for _ in Progress(range(3), desc="bar"):
    Progress.write("message", file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_real_terminal_and_a_real_pipe():
    command = [sys.executable, "-c", TRAIN]
    ours, its = open_terminal()
    process = subprocess.Popen(command, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 1000):
            shown += part
    except OSError:
        pass  # Linux: the process has ended
    os.close(ours)
    assert process.wait() == 0
    assert b"bar: 100%|" in shown
    assert shown.replace(b"\r\n", b"\n").count(b"\r") > 3
    piped = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert piped.startswith("message\nmessage\nmessage\nbar: 100% 3/3 [")
    assert piped.count("\n") == 4


# ---------------------------------------------------------------- every bar


def imports_of_tqdm(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] == "tqdm":
                yield node.lineno


def test_every_bar_is_this_one():
    found = []
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        if folder != "tests" and not folder.startswith("."):
            found += [path for _ in imports_of_tqdm(path)]
    assert found == [ROOT / "runtime" / "process" / "progress.py"]
    assert progress.tqdm is tqdm
