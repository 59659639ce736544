"""A real browser for the tests of pages."""

import os
import shutil

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and os.environ.get("THINKER_PAGES") != "1":
        pytest.skip("there is no Chromium here: apt-get install chromium")
    assert CHROMIUM, "THINKER_PAGES=1, and there is no Chromium"
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()
