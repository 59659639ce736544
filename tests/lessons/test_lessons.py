"""Every lesson runs as a script, checks its own numbers, and takes its solutions."""

import re

import jupytext
import nbformat.v4
import pytest
from conftest import ROOT, run_script

from thinker.lessons.build import FOLDER, find_lessons, keep_times, make_index, make_readme

LESSONS = find_lessons()
N_EXERCISES = 3


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_runs_and_takes_its_solutions(lesson, tmp_path):
    done = run_script(ROOT / "lessons" / lesson.path.name, cwd=tmp_path, THINKER_LESSONS_FAST="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("Not answered yet: replace the dots.") == N_EXERCISES
    assert lines.count("Right.") == N_EXERCISES


@pytest.mark.parametrize("name", ["02-masks", "06-the-cache", "07-train-one", "09-make-it-small"])
def test_the_seed_reaches_what_a_lesson_trains_itself(name, tmp_path):
    printed = []
    for seed in ("0", "0", "10"):
        options = {"THINKER_LESSONS_FAST": "1", "THINKER_LESSONS_SEED": seed}
        done = run_script(ROOT / "lessons" / f"{name}.py", cwd=tmp_path, **options)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        # Lesson 6 prints times; what it trains itself stands in the lines of networks.
        chosen = [line for line in lines if line.startswith(("GRU", "convolution"))] or lines
        printed.append(chosen)
    assert printed[0] == printed[1] != printed[2]


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


@pytest.mark.parametrize("name", ["02-masks", "05-sparse-attention", "06-the-cache"])
def test_two_builds_differ_only_in_times(name, tmp_path):
    for out in ("one", "two"):
        options = ("--fast", "--only", name, "--out", tmp_path / out)
        done = run_script("-m", "thinker.lessons.build", *options, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / out / f"{name}.ipynb" for out in ("one", "two"))
    notebooks = [jupytext.read(path) for path in (one, two)]
    for notebook in notebooks:
        for cell in notebook.cells:
            if "times" in cell.metadata.get("tags", []):
                cell.outputs = []
    assert notebooks[0] == notebooks[1]
    if name == "02-masks":  # measures no times
        assert one.read_bytes() == two.read_bytes()


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+%?|%)")  # with decimals, or in percent
SENTENCE_END = re.compile(r"(?<=[.:?!)])\s+")


def printed_numbers(notebook):
    """The numbers in the outputs of a notebook, with and without a percent sign."""
    found = set()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            found.update(NUMBER.findall(text))
    return found | {number.rstrip("%") for number in found}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_what_a_text_says_of_its_run_is_printed(lesson):
    """A sentence with "here" quotes numbers of this run; the next build may print others."""
    notebook = jupytext.read(FOLDER / "notebooks" / f"{lesson.name}.ipynb")
    printed = printed_numbers(notebook)
    stale = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for sentence in SENTENCE_END.split(cell.source):
            if not re.search(r"\bhere\b", sentence, re.IGNORECASE):
                continue
            quoted = NUMBER.findall(sentence)
            stale += [(number, sentence) for number in quoted if number not in printed]
    assert stale == []


def test_no_notebook_has_addresses():
    for path in (FOLDER / "notebooks").glob("*.ipynb"):
        assert " at 0x" not in path.read_text(encoding="utf-8")


def make_notebook(code, printed):
    """A notebook with a cell that measures times, and one that does not."""
    notebook = nbformat.v4.new_notebook()
    for source, tags in ((code, ["times"]), ("print(1)", [])):
        output = nbformat.v4.new_output("stream", name="stdout", text=printed)
        cell = nbformat.v4.new_code_cell(source, outputs=[output], metadata={"tags": tags})
        notebook.cells.append(cell)
    return notebook


def test_times_are_kept_while_the_code_is_the_same(tmp_path):
    kept = tmp_path / "kept.ipynb"
    new = make_notebook("measure()", "2 s")
    keep_times(new, kept)  # there is none yet
    assert [cell.outputs[0].text for cell in new.cells] == ["2 s", "2 s"]
    jupytext.write(make_notebook("measure()", "1 s"), kept)
    keep_times(new, kept)
    assert [cell.outputs[0].text for cell in new.cells] == ["1 s", "2 s"]
    other = make_notebook("measure(twice)", "2 s")
    keep_times(other, kept)
    assert [cell.outputs[0].text for cell in other.cells] == ["2 s", "2 s"]
