"""Every lesson runs as a script, checks its own numbers, and takes its solutions."""

import pytest
from conftest import ROOT, run_script

from thinker.lessons.build import find_lessons, make_index

LESSONS = find_lessons()
N_EXERCISES = 3


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_runs_and_takes_its_solutions(lesson, tmp_path):
    done = run_script(ROOT / "lessons" / lesson.path.name, cwd=tmp_path, THINKER_LESSONS_FAST="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("Not answered yet: replace the dots.") == N_EXERCISES
    assert lines.count("Right.") == N_EXERCISES


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_has_the_usual_parts(lesson):
    text = lesson.path.read_text(encoding="utf-8")
    for part in ("# ## Exercises", "# ## Solutions", "# ## Words of this lesson", 'tags=["check"]', "<details>"):
        assert part in text
    assert text.count('tags=["exercise"]') == N_EXERCISES


def test_the_index_lists_every_lesson():
    page = make_index(LESSONS)
    for lesson in LESSONS:
        assert f'href="{lesson.name}.html"' in page
