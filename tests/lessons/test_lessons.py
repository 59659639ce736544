"""Every lesson runs as a script, checks its own numbers, and takes its solutions."""

import jupytext
import pytest
from conftest import ROOT, run_script

from thinker.lessons.build import FOLDER, find_lessons, make_index, make_readme

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
    for part in (
        "# ## Exercises",
        "# ## Solutions",
        "# ## Words of this lesson",
        'tags=["check"]',
        "<details>",
    ):
        assert part in text
    assert text.count('tags=["exercise"]') == N_EXERCISES


def test_the_index_lists_every_lesson():
    page = make_index(LESSONS)
    for lesson in LESSONS:
        assert f'href="{lesson.name}.html"' in page


def test_the_readme_lists_every_lesson():
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == make_readme(LESSONS)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_notebook_is_built_from_its_source(lesson):
    notebook = jupytext.read(FOLDER / "notebooks" / f"{lesson.name}.ipynb")
    assert [cell.source for cell in notebook.cells] == [
        cell.source for cell in jupytext.read(lesson.path).cells
    ]
    assert all(
        cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code"
    )
