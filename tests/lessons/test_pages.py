"""Built pages open from disk, say nothing on the console, ask nothing of the network, and fit narrow screens."""

import chromium
import pytest
from conftest import ROOT, run_script

from thinker.lessons.build import find_lessons

browser = chromium.browser
FIRST = find_lessons()[0].name


@pytest.fixture(scope="module")
def pages(tmp_path_factory, request):
    """The first lesson and the index; with --stress all lessons, in fast form."""
    out = tmp_path_factory.mktemp("pages")
    only = [] if request.config.getoption("--stress") else ["--only", FIRST]
    done = run_script("-m", "thinker.lessons.build", "--fast", "--out", out, *only, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return sorted(out.glob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_quiet_and_fit(pages, browser, scheme):
    tab = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or said.append(request.url))
    for page in pages:
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.locator("h1").count() == 1
        assert tab.locator(".exercise").count() == (0 if page.name == "index.html" else 3)
    tab.close()
    assert said == []
