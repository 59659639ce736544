"""Built pages open from disk, say nothing on the console, ask nothing of the network, and fit
narrow screens."""

import chromium
import jupytext
import pytest
from conftest import ROOT, run_script

from thinker.lessons.build import FOLDER, find_lessons, make_index, to_page

browser = chromium.browser
LESSONS = find_lessons()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, request):
    """The index, and a page of each notebook in the repository; with --stress built anew, in fast
    form."""
    out = tmp_path_factory.mktemp("pages")
    if request.config.getoption("--stress"):
        done = run_script(
            "-m", "thinker.lessons.build", "--fast", "--out", out, cwd=ROOT, timeout=1200
        )
        assert done.returncode == 0, done.stderr
    else:
        for lesson in LESSONS:
            notebook = jupytext.read(FOLDER / "notebooks" / f"{lesson.name}.ipynb")
            page = to_page(lesson, notebook, {"previous": None, "next": None}, None)
            (out / f"{lesson.name}.html").write_text(page, encoding="utf-8")
        (out / "index.html").write_text(make_index(LESSONS), encoding="utf-8")
    return sorted(out.glob("*.html"))


def tagged(page, tag):
    """The cells with a tag in the source of a page, without white space."""
    if page.name == "index.html":
        return []
    cells = jupytext.read(FOLDER / f"{page.stem}.py").cells
    return ["".join(cell.source.split()) for cell in cells if tag in cell.metadata.get("tags", [])]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_quiet_and_fit(pages, browser, scheme):
    tab = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on(
        "request",
        lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url),
    )
    for page in pages:
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.locator("h1").count() == 1
        assert tab.locator(".exercise").count() == (0 if page.name == "index.html" else 3)
        assert tab.locator("details.code").count() == len(tagged(page, "folded"))
        text = "".join(tab.locator("main").inner_text().split())  # without what is folded
        assert not [
            code for code in (*tagged(page, "check"), *tagged(page, "folded")) if code in text
        ]
        assert all(code in text for code in tagged(page, "exercise"))
    tab.close()
    assert said == []
    assert len(pages) == len(LESSONS) + 1


def test_the_command_builds_a_lesson_and_refuses_others(tmp_path):
    done = run_script("-m", "thinker.lessons.build", "--only", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: no lesson contains 'nothing'; they are: 01-attention-by-hand, "
    )
    done = run_script("-m", "thinker.lessons.build", "--keep", "--fast", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --keep needs lessons in full; remove --fast\n",
    )
