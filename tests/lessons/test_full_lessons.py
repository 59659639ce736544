"""Every claim that a lesson checks holds in full training: for several seeds, and with one thread or
two."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from thinker.lessons.build import find_lessons

WITHOUT_TRAINING = {"01-attention-by-hand"}
# Seeds and numbers of threads. The seeds are far apart, since a lesson may add a few to them.
RUNS = ((0, 1), (10, 1), (20, 2))
RUNS_WITHOUT_TRAINING = ((0, 1), (0, 2))


def cases():
    """Lessons with a seed and a number of threads."""
    found = []
    for lesson in reversed(find_lessons()):  # the longest first
        runs = RUNS
        if lesson.name in WITHOUT_TRAINING:
            runs = RUNS_WITHOUT_TRAINING
        for run in runs:
            found.append(pytest.param(lesson, *run))
    return found


def name_of(value):
    return getattr(value, "name", None)


@pytest.mark.parametrize(("lesson", "seed", "n_threads"), cases(), ids=name_of)
def test_a_lesson_holds_in_full(lesson, seed, n_threads, tmp_path):
    environment = dict(os.environ)
    environment.pop("THINKER_LESSONS_FAST", None)
    environment["THINKER_LESSONS_SEED"] = str(seed)
    environment["OMP_NUM_THREADS"] = str(n_threads)
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins takes time from other tests
    environment["PYTHONUTF8"] = "1"
    # A process of its own: the number of threads is read when torch is imported.
    done = subprocess.run(
        [sys.executable, str(ROOT / "lessons" / lesson.path.name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines().count("Right.") == 3
