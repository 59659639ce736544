"""What the tests of the page share: a real Chromium, a small model with its page, and what can be
read off it."""

import re
from dataclasses import replace
from pathlib import Path

import chromium
import pytest
import torch
from conftest import random_model

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import html_report, reports

browser = chromium.browser
TEXT = "The cat <b>sat</b> on a mat."
STYLE = (Path(html_report.__file__).parent / "page" / "html_report.css").read_text()


@pytest.fixture(scope="module")
def free_tabs(browser):
    """Tabs for the next test: a new one takes half a second."""
    return []


@pytest.fixture
def visit(browser, free_tabs):
    """Opens a page; afterwards it must have asked for nothing but itself and have nothing to
    complain of."""
    opened = []

    def visit(path, width=1440, scheme="light", size=900):
        tab = free_tabs.pop() if free_tabs else browser.new_page()
        tab.set_viewport_size({"width": width, "height": size})
        tab.emulate_media(color_scheme=scheme)
        asked, faults = [], []
        listeners = {
            "request": lambda request: asked.append(request.url),
            "console": lambda message: faults.append(message.text),
            "pageerror": lambda error: faults.append(str(error)),
            "dialog": lambda dialog: (faults.append(dialog.message), dialog.dismiss()),
        }
        opened.append((tab, path, listeners, asked, faults))
        for event, listener in listeners.items():
            tab.on(event, listener)
        tab.goto(path.as_uri())
        wait_until_painted(tab)
        return tab

    yield visit
    for tab, path, listeners, asked, faults in opened:
        wait_until_painted(tab)
        tab.evaluate("localStorage.clear()")
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        tab.mouse.move(0, 0)
        tab.goto("about:blank")
        free_tabs.append(tab)
        assert faults == []
        assert asked == [path.as_uri()]


QUIET = """async () => {
    const figures = (what) => document.querySelectorAll(`.panel ${what}`).length;
    const unpacked = () => matrix() || !isStored(state.layer, state.head);
    const opened = () => !facts || (state.wanted === `${state.layer}-${state.head}` && unpacked());
    do await new Promise(requestAnimationFrame); while (waiting || !opened() || figures("canvas") < figures(".map"));
}"""


def wait_until_painted(tab):
    """Until what was begun is painted."""
    tab.evaluate(QUIET)


class Shown:
    """A model, what it computes, and its page."""

    def __init__(self, folder, text=TEXT, **shape):
        self.model = random_model(**{"vocab_size": 257, "n_layers": 3, "std": 0.25, **shape})
        self.tokenizer = make_tokenizer("byte", [])
        self.prompt = reports.Prompt.from_text(self.model, self.tokenizer, text)
        self.tokens, self.T = self.prompt.tokens, len(self.prompt.tokens)
        self.weights = self.model.attention_weights(self.tokens[None])[:, 0]  # (layers, H, T, T)
        with torch.no_grad():
            self.shares = self.model(self.tokens[None])[0].softmax(dim=-1)  # (T, V)
        self.explorer = html_report.make_explorer(self.model, self.tokenizer, self.prompt)
        self.path = folder / "page.html"
        start = {"layer": 1, "head": 2, "position": 9, "view": "attention"}
        page = replace(self.explorer, facts=self.explorer.facts | {"start": start})
        html_report.write_html_report(self.path, "a model", None, page)

    def byte(self, layer, head, query, key):
        return round(255 * self.weights[layer, head, query, key].clamp(0, 1).sqrt().item())


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return Shown(tmp_path_factory.mktemp("page"))


def heat(byte, dark=False):
    """The colour of a weight, from the style sheet."""
    stops = re.findall(r"--heat-\d: light-dark\((#\w+), (#\w+)\)", STYLE)
    rgb = [[int(pair[dark][at : at + 2], 16) for at in (1, 3, 5)] for pair in stops]
    place = byte / 255 * 4
    low = min(int(place), 3)
    return [a + (place - low) * (b - a) for a, b in zip(rgb[low], rgb[low + 1])]


def pixel(tab, query, key):
    """The colour in the middle of a cell of the head's heatmap."""
    return tab.evaluate(
        """([q, k]) => {
            const map = state.map, dense = devicePixelRatio;
            const x = (map.left + (k + 0.5) * map.cw) * dense, y = (map.top + (q + 0.5) * map.ch) * dense;
            const one = make("canvas", { width: 1, height: 1 }).getContext("2d");
            one.drawImage(map.canvas, -Math.floor(x), -Math.floor(y));
            return [...one.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        [query, key],
    )


def tokens(tab):
    return tab.locator("#tokens button")


def backgrounds(tab):
    found = tokens(tab).evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    return [[int(x) for x in re.findall(r"\d+", color)] for color in found]


def view(tab, name):
    tab.locator("#view").get_by_text(name, exact=True).click()
    wait_until_painted(tab)


def cell(tab, layer, head):
    return tab.get_by_role("gridcell", name=f"layer {layer} head {head},")


def share(text):
    """A percentage as a number."""
    return 0.0 if text.startswith("<") else float(text.split("%")[0]) / 100
