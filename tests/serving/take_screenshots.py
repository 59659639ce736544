"""Take the pictures of the playground in docs/images: python tests/serving/take_screenshots.py URL
[MODEL].

URL: a running server, with a trained model. Run it by hand after the page has changed, and look at
the pictures.
"""

import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SCREENS = {
    "light": (1200, 800, "light", 4),
    "dark": (1200, 800, "dark", 24),
    "narrow": (360, 740, "light", 4),
}


def take(browser: Browser, url: str, name: str, parameters: dict[str, str]) -> None:
    """Write a text, open the popover of a token, and save the picture."""
    width, height, scheme, token = SCREENS[name]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(f"{url}/#{urlencode(parameters)}")
    page.locator("#continue:enabled").click()
    page.get_by_role("button", name="Continue").wait_for()
    page.locator(".token").nth(token).click()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=IMAGES / f"playground-{name}.png")
    page.close()


if __name__ == "__main__":
    url, *models = sys.argv[1:]
    parameters = {"prompt": "Once upon a time", "seed": "1"}
    if models:
        parameters["model"] = models[0]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name in SCREENS:
            take(browser, url.rstrip("/"), name, parameters)
