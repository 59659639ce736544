"""Build the lessons: run each one, and write a notebook and a page.

python -m thinker.lessons.build --out site/lessons
"""

import argparse
import html
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from thinker.runtime.errors import UserError, install_command, run_command

FOLDER = Path(__file__).parent
PAGE = FOLDER / "page"
TIMEOUT_S = 600  # of a cell


class Lesson(NamedTuple):
    """A lesson in percent format, with the title and the first sentence of its text."""

    path: Path
    title: str
    question: str

    @property
    def name(self) -> str:
        """Name of its notebook and page, without the ending."""
        return self.path.stem


def find_lessons(folder: Path = FOLDER) -> list[Lesson]:
    """All lessons in order."""
    return [read_lesson(path) for path in sorted(folder.glob("[0-9][0-9]-*.py"))]


def read_lesson(path: Path) -> Lesson:
    """A lesson with its heading and its question, which is the first sentence in italics."""
    lines = path.read_text(encoding="utf-8").splitlines()
    title = next(line for line in lines if line.startswith("# # "))
    question = next(line for line in lines if line.startswith("# *"))
    return Lesson(path, title.removeprefix("# # "), question.split("*")[1])


def execute(lesson: Lesson, folder: Path) -> Any:
    """Run the lesson in `folder`; returns the notebook with its outputs. Raises
    CellExecutionError."""
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(lesson.path)
    for number, cell in enumerate(notebook.cells):
        # Not random, so that a new build changes no more than the lesson does.
        cell.id = f"cell-{number}"
        if "folded" in cell.metadata.get("tags", []):  # code that few want to read
            cell.metadata["jupyter"] = {"source_hidden": True}
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    options = {"timeout": TIMEOUT_S, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, **options, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in code_cells(notebook):  # no progress bars, and no messages about this machine
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def keep_times(notebook: Any, path: Path) -> None:
    """Give cells that measure times (tag `times`) the outputs that they have in the notebook at
    `path`, if all its code is the same.

    So on the same kind of processor, a new build of an unchanged lesson changes nothing, though no
    two measurements agree.
    """
    import jupytext

    if not path.exists():
        return
    kept = jupytext.read(path)
    if code_of(kept) != code_of(notebook):
        return
    for cell, old in zip(code_cells(notebook), code_cells(kept)):
        if "times" in cell.metadata.get("tags", []):
            cell.outputs = old.outputs


def code_cells(notebook: Any) -> list[Any]:
    """The cells of a notebook that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_of(notebook: Any) -> list[str]:
    """The sources of the cells that are run."""
    return [cell.source for cell in code_cells(notebook)]


def to_page(
    lesson: Lesson, notebook: Any, neighbors: dict[str, str | None], colab: str | None
) -> str:
    """The page of an executed lesson; it needs no other file and no network."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="thinker-lesson", extra_template_basedirs=[str(PAGE)])
    facts = {
        "title": lesson.title,
        "name": lesson.name,
        "css": read_css(),
        "colab": colab,
        **neighbors,
    }
    page, _ = exporter.from_notebook_node(notebook, resources={"lesson": facts})
    return page


def read_css() -> str:
    """The style of all pages."""
    return (PAGE / "lesson.css").read_text(encoding="utf-8")


def make_index(lessons: list[Lesson]) -> str:
    """The page that lists the lessons."""
    items = "".join(
        f'<li><h2><a href="{lesson.name}.html">{number}. {html.escape(lesson.title)}</a></h2>'
        f"<p>{html.escape(lesson.question)}</p></li>"
        for number, lesson in enumerate(lessons, 1)
    )
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    return text.replace("/* css */", read_css()).replace("<!-- lessons -->", items)


def make_readme(lessons: list[Lesson]) -> str:
    """The list of lessons in Markdown, with links to the notebooks."""
    lines = [
        f"| {number} | [{lesson.title}](notebooks/{lesson.name}.ipynb) | {lesson.question} |"
        for number, lesson in enumerate(lessons, 1)
    ]
    return (
        (PAGE / "README.md")
        .read_text(encoding="utf-8")
        .replace("<!-- lessons -->", "\n".join(lines))
    )


def colab_link(repository: str | None, lesson: Lesson) -> str | None:
    """Where Colab opens the lesson's notebook in a GitHub repository."""
    if repository is None:
        return None
    return f"https://colab.research.google.com/github/{repository}/blob/main/lessons/notebooks/{lesson.name}.ipynb"


def build(lessons: list[Lesson], out: Path, repository: str | None, is_kept: bool) -> None:
    """Run the lessons and write notebooks, pages and the index; `is_kept`: also what the repository
    keeps."""
    import jupytext

    out.mkdir(parents=True, exist_ok=True)
    for index, lesson in enumerate(lessons):
        start = time.monotonic()
        notebook = execute(lesson, out)
        if is_kept:
            kept = FOLDER / "notebooks" / f"{lesson.name}.ipynb"
            keep_times(notebook, kept)
            jupytext.write(notebook, kept)
        jupytext.write(notebook, out / f"{lesson.name}.ipynb")
        neighbors = {
            "previous": lessons[index - 1].name if index else None,
            "next": lessons[index + 1].name if index + 1 < len(lessons) else None,
        }
        page = to_page(lesson, notebook, neighbors, colab_link(repository, lesson))
        (out / f"{lesson.name}.html").write_text(page, encoding="utf-8")
        print(f"{lesson.name}: {time.monotonic() - start:.0f} s", flush=True)
    (out / "index.html").write_text(make_index(lessons), encoding="utf-8")
    if is_kept:
        (FOLDER / "README.md").write_text(make_readme(find_lessons()), encoding="utf-8")
    print(f"open {out / 'index.html'}")


def main() -> int:
    """Parse the command line and build. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Run the lessons and write a notebook and a page for each."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("site/lessons"), metavar="FOLDER", help="folder to write"
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="build only lessons whose names contain this text"
    )
    parser.add_argument(
        "--repository", metavar="OWNER/NAME", help="GitHub repository for links to Colab"
    )
    parser.add_argument("--fast", action="store_true", help="train less, as in the tests")
    parser.add_argument(
        "--keep", action="store_true", help="also write lessons/notebooks and lessons/README.md"
    )
    arguments = parser.parse_args()
    if arguments.fast:
        os.environ["THINKER_LESSONS_FAST"] = "1"
    if arguments.keep and arguments.fast:
        raise UserError("--keep needs lessons in full; remove --fast")
    # Not the number of cores, on which the last digits of the trained models would depend.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lessons = [
        lesson for lesson in find_lessons() if not arguments.only or arguments.only in lesson.name
    ]
    if not lessons:
        names = ", ".join(lesson.name for lesson in find_lessons())
        raise UserError(f"no lesson contains {arguments.only!r}; they are: {names}")
    try:
        build(lessons, arguments.out, arguments.repository, arguments.keep)
    except ModuleNotFoundError as error:
        remedy = f"install it: {install_command('lessons')}"
        raise UserError(f"building lessons needs {error.name}; {remedy}") from error
    return 0


if __name__ == "__main__":
    run_command(main)
