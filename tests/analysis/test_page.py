"""The page in a real Chromium: nothing is loaded, nothing fails, and what it shows is what the model computed."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import random_thinker
from hypothesis import given
from hypothesis import strategies as st

from analysis import attribution, page, pruning, reports
from data.make_tokenizer import make_tokenizer
from errors import UserError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = "The cat <b>sat</b> on a mat."
STYLE = (Path(page.__file__).parent / "page.css").read_text()
pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.fixture
def visit(browser):
    """Opens a page; afterwards it must have asked for nothing but itself and have nothing to complain of."""
    opened = []

    def visit(path, width=1440, scheme="light", size=900):
        tab = browser.new_page(viewport={"width": width, "height": size}, color_scheme=scheme)
        asked, faults = [], []
        opened.append((tab, path, asked, faults))
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        tab.set_default_timeout(5000)
        tab.goto(path.as_uri())
        settle(tab)
        return tab

    yield visit
    for tab, path, asked, faults in opened:
        settle(tab)
        tab.close()
        assert faults == []
        assert asked == [path.as_uri()]


QUIET = """async () => {
    const figures = (what) => document.querySelectorAll(`.panel ${what}`).length;
    const unpacked = () => matrix() || !isHeld(state.layer, state.head);
    const opened = () => !facts || (state.wanted === `${state.layer}-${state.head}` && unpacked());
    do await new Promise(requestAnimationFrame); while (waiting || !opened() || figures("canvas") < figures(".map"));
}"""


def settle(tab):
    """Until what was begun is painted."""
    tab.evaluate(QUIET)


class Shown:
    """A model, what it computes, and its page."""

    def __init__(self, folder, text=TEXT, **shape):
        self.thinker = random_thinker(**{"vocab_size": 257, "n_layers": 3, "weights": 0.25, **shape})
        self.tokenizer = make_tokenizer("byte", [])
        self.prompt = reports.Prompt.read(self.thinker, self.tokenizer, text)
        self.tokens, self.T = self.prompt.tokens, len(self.prompt.tokens)
        self.weights = self.thinker.attention_weights(self.tokens[None])[:, 0]  # (layers, H, T, T)
        with torch.no_grad():
            self.shares = self.thinker(self.tokens[None])[0].softmax(dim=-1)  # (T, V)
        self.explorer = page.gather(self.thinker, self.tokenizer, self.prompt)
        self.path = folder / "page.html"
        page.write_page(self.path, "a model", None, self.explorer, layer=1, head=2, position=9)

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
    settle(tab)


def cell(tab, layer, head):
    return tab.get_by_role("gridcell", name=f"layer {layer} head {head},")


def test_it_holds_every_weight_within_1_255(shown, visit):
    tab = visit(shown.path)
    found = tab.evaluate(
        """async () => {
            for (const l of range(facts.layers)) for (const h of range(facts.heads)) await openHead(l, h);
            return range(facts.layers).map(l => range(facts.heads).map(h => range(T).map(q => range(T).map(
                k => matrices.get(`${l}-${h}`).weight(q, k)))));
        }"""
    )
    error = (torch.tensor(found) - shown.weights).abs()
    assert 0 < error.max() <= 1 / 255
    assert tab.title() == "a model"


def test_a_click_on_a_head_shows_it(shown, visit):
    tab = visit(shown.path)
    assert tab.locator("#head-name").inner_text() == "Layer 1, head 2"
    for layer, head in ((1, 2), (2, 0), (0, 3)):
        cell(tab, layer, head).click()
        settle(tab)
        assert tab.locator("#head-name").inner_text() == f"Layer {layer}, head {head}"
        assert cell(tab, layer, head).get_attribute("aria-selected") == "true"
        for query, key in ((20, 3), (9, 8), (5, 5), (12, 0)):
            assert pixel(tab, query, key) == pytest.approx(heat(shown.byte(layer, head, query, key)), abs=2)
    assert tab.locator("[role=gridcell][aria-selected=true]").count() == 1


def test_the_slider_goes_through_the_layers(shown, visit):
    tab = visit(shown.path)
    slider = tab.get_by_label("layer", exact=False).and_(tab.get_by_role("slider"))
    for key, layer in (("ArrowRight", 2), ("Home", 0)):
        slider.press(key)
        settle(tab)
        assert tab.locator("#head-name").inner_text() == f"Layer {layer}, head 2"
        assert pixel(tab, 20, 3) == pytest.approx(heat(shown.byte(layer, 2, 20, 3)), abs=2)


def test_hovering_shows_what_a_token_looks_at(shown, visit):
    tab = visit(shown.path)

    def check(query, column=False):
        for key, color in enumerate(backgrounds(tab)):
            pair = (key, query) if column else (query, key)
            if pair[1] > pair[0]:
                assert color == [0, 0, 0, 0]
            else:
                assert color == pytest.approx(heat(shown.byte(1, 2, *pair)), abs=2)

    check(9)
    tokens(tab).nth(14).hover()
    settle(tab)
    check(14)
    first = tab.locator("#tip").inner_text().split("\n")
    assert first[0] == f"14 {shown.prompt.labels[14]} looks at"
    value, key = re.match(r"(0\.\d+) +(\d+) ", first[1]).groups()
    assert int(key) == shown.weights[1, 2, 14].argmax()
    assert float(value) == pytest.approx(shown.weights[1, 2, 14].max().item(), abs=1 / 255 + 5e-4)
    assert f"token 14 {shown.prompt.labels[14]} looks at" in tab.locator("#status").inner_text()
    tab.mouse.move(1, 1)
    settle(tab)
    check(9)
    assert tab.locator("#tip").is_hidden()
    tab.get_by_text("is looked at by").click()
    settle(tab)
    check(9, column=True)


def test_a_locked_token_stays_until_escape(shown, visit):
    tab = visit(shown.path)
    tokens(tab).nth(17).click()
    locked = tokens(tab).nth(17)
    settle(tab)
    kept = backgrounds(tab)
    assert locked.get_attribute("aria-pressed") == "true"
    tokens(tab).nth(4).hover()
    settle(tab)
    assert backgrounds(tab) == kept
    value = float(tab.locator("#tip").inner_text().split("\n")[1])
    assert value == pytest.approx(shown.weights[1, 2, 17, 4].item(), abs=1 / 255 + 5e-4)
    tab.mouse.move(1, 1)
    settle(tab)
    assert backgrounds(tab) == kept
    assert "(locked)" in tab.locator("#status").inner_text()
    tab.keyboard.press("Escape")
    tokens(tab).nth(4).hover()
    settle(tab)
    assert backgrounds(tab) != kept
    assert locked.get_attribute("aria-pressed") == "false"


def test_the_heatmap_answers_the_pointer(shown, visit):
    tab = visit(shown.path)
    box = tab.evaluate("(({left, top, cw, ch}) => ({left, top, cw, ch}))(state.map)")
    place = {"x": box["left"] + 6.5 * box["cw"], "y": box["top"] + 12.5 * box["ch"]}
    tab.locator("#map canvas").hover(position=place)
    settle(tab)
    said = tab.locator("#tip").inner_text().split("\n")
    assert said[0] == f"12 {shown.prompt.labels[12]} → 6 {shown.prompt.labels[6]}"
    assert float(said[1]) == pytest.approx(shown.weights[1, 2, 12, 6].item(), abs=1 / 255 + 5e-4)
    assert tab.locator("#map .cross:visible").count() == 2
    tab.locator("#map canvas").click(position=place)
    settle(tab)
    assert tokens(tab).nth(12).get_attribute("aria-pressed") == "true"


def test_a_long_prompt_scrolls_to_the_token(tmp_path, visit):
    shown = Shown(tmp_path, "a long prompt " * 40, max_seq_len=1024, n_layers=1)
    page.write_page(shown.path, "long", None, shown.explorer)
    tab = visit(shown.path)
    inside = """token => {
        const [box, one] = [$("tokens"), $("tokens").children[token]].map(part => part.getBoundingClientRect());
        return one.top >= box.top && one.bottom <= box.bottom;
    }"""
    assert tab.evaluate(inside, shown.T - 1)
    assert not tab.evaluate(inside, 0)
    first, *_ = tab.evaluate("state.sides[1].tokens.map(([token]) => token)")
    tab.locator("#lines").click(position={"x": 320 - 34 - 10, "y": 10})
    settle(tab)
    assert tokens(tab).nth(first).get_attribute("aria-pressed") == "true"
    assert tab.evaluate(inside, first)
    assert tab.evaluate("scrollY") == 0


def test_lines_answer_the_pointer(shown, visit):
    tab = visit(shown.path)
    before = tab.evaluate("$('lines').toDataURL()")
    x, y = 20, tab.evaluate("state.sides[0].tokens[21][1]")
    tab.locator("#lines").hover(position={"x": x, "y": y})
    settle(tab)
    assert f"token 21 {shown.prompt.labels[21]} looks" in tab.locator("#status").inner_text()
    assert tab.evaluate("$('lines').toDataURL()") != before
    tab.locator("#lines").click(position={"x": x, "y": y})
    settle(tab)
    assert tokens(tab).nth(21).get_attribute("aria-pressed") == "true"


def test_the_keyboard_alone_can_do_all(shown, visit):
    tab = visit(shown.path)

    def tab_to(selector):
        for _ in range(20):
            tab.keyboard.press("Tab")
            if tab.evaluate("selector => document.activeElement.matches(selector)", selector):
                assert (
                    tab.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
                    or "input" in selector
                )
                return
        raise AssertionError(f"{selector} is not reached")

    def press(*keys):
        for key in keys:
            tab.keyboard.press(key)
        settle(tab)

    tab_to("#theme")
    tab_to("summary")
    press("Enter")
    assert tab.get_by_text("at most 1/255 off").is_visible()
    tab_to("#view input")
    tab_to("#direction input")
    tab_to("#tokens button")
    press("ArrowRight", "ArrowRight")
    assert f"token 11 {shown.prompt.labels[11]} looks at" in tab.locator("#status").inner_text()
    press("Enter", "Home")
    assert tokens(tab).nth(11).get_attribute("aria-pressed") == "true"
    value = float(tab.locator("#tip").inner_text().split("\n")[1])
    assert value == pytest.approx(shown.weights[1, 2, 11, 0].item(), abs=1 / 255 + 5e-4)
    press("End", "Space")
    assert tokens(tab).nth(shown.T - 1).get_attribute("aria-pressed") == "true"
    press("Escape")
    assert tab.locator("[aria-pressed=true]").count() == 0
    tab_to("#measure")
    press("ArrowDown")
    assert tab.locator("#grid .score:visible").count() == 12
    tab_to("[role=gridcell]")
    press("ArrowUp", "ArrowRight", "Enter")
    assert tab.locator("#head-name").inner_text() == "Layer 0, head 3"
    tab_to("#layer")
    press("ArrowRight")
    assert tab.locator("#head-name").inner_text() == "Layer 1, head 3"
    for _ in range(8):
        tab.keyboard.press("Shift+Tab")
        if tab.evaluate("document.activeElement.name") == "view":
            break
    press("ArrowRight")
    assert tab.locator("#parts-card").is_visible()
    press("ArrowRight")
    assert tab.locator("#lens-card").is_visible()


def test_attribution(shown, visit):
    tab = visit(shown.path)
    view(tab, "Attribution")
    target = int(shown.shares[-1].argmax())
    given, _, missed = attribution.integrated_gradients(
        shown.thinker, shown.tokens, target, baseline=shown.tokenizer.prompt_start[0]
    )
    parts = attribution.direct_logit_attribution(shown.thinker, shown.tokens, target)
    labels = tokens(tab).evaluate_all("all => all.map(one => one.ariaLabel)")
    found = [float(text.rsplit("adds ", 1)[1].replace("−", "-")) for text in labels]
    assert found == pytest.approx(given.tolist(), abs=1e-3)
    what = f"logit of ‘{reports.label(shown.tokenizer, target)}’ after position {shown.T - 1}"
    assert what in tab.locator("#parts-what").inner_text()
    assert f"{parts.y:.4f}" in tab.locator("#parts-what").inner_text()
    assert what in tab.locator("#meaning").inner_text()
    lines = tab.locator("#by-part li").all_inner_texts()
    listed = {line.split("\n")[0]: float(line.split("\n")[-1].replace("−", "-")) for line in lines}
    assert listed["head 2.1"] == pytest.approx(parts.heads[2, 1].item(), abs=1e-3)
    assert sum(listed.values()) == pytest.approx(parts.y, abs=0.02)
    assert tab.locator("#parts-missed").is_visible() == (abs(missed) >= 0.05 * max(1, abs(given.sum() - missed)))
    most = backgrounds(tab)[int(given.abs().argmax())]
    sign = "plus" if given[given.abs().argmax()] > 0 else "minus"
    assert most == [int(re.search(rf"--{sign}: light-dark\(#(\w+)", STYLE)[1][at : at + 2], 16) for at in (0, 2, 4)]
    tab.get_by_role("button", name="head 2.1").click()
    settle(tab)
    assert tab.locator("#head-name").inner_text() == "Layer 2, head 1"


def test_lens(shown, visit):
    tab = visit(shown.path)
    view(tab, "Lens")
    lens = attribution.logit_lens(shown.thinker, shown.tokens).softmax(dim=-1)  # (layers + 1, T, V)
    tokens(tab).nth(6).click()
    tab.get_by_role("slider").press("ArrowLeft")
    settle(tab)
    rows = tab.locator("#lens tbody tr")
    assert rows.count() == 4
    for depth in range(4):
        cells = (
            rows.nth(depth)
            .locator("td")
            .evaluate_all("all => all.map(one => [one.firstChild.textContent, one.lastChild.textContent])")
        )
        top = lens[depth, 6].topk(5)
        assert [text for text, _ in cells[:5]] == [reports.label(shown.tokenizer, t) for t in top.indices.tolist()]
        wanted = [*top.values.tolist(), lens[depth, 6, shown.tokens[7]].item()]
        assert [share(number) for _, number in cells] == pytest.approx(wanted, abs=6e-4)
    assert rows.nth(2).get_attribute("class") == "at"
    follows = lens[2, torch.arange(shown.T - 1), shown.tokens[1:]]
    for value, color in zip(follows.tolist(), backgrounds(tab)):
        assert color == pytest.approx(heat(round(255 * value**0.5)), abs=2)


def share(text):
    """A percentage as a number."""
    return 0.0 if text.startswith("<") else float(text.split()[0]) / 100


def test_what_comes_next(shown, visit):
    tab = visit(shown.path)
    tokens(tab).nth(5).hover()
    settle(tab)
    top = shown.shares[5].topk(10)
    lines = [line.split("\n") for line in tab.locator("#next li").all_inner_texts()]
    assert [line[0] for line in lines] == [reports.label(shown.tokenizer, t) for t in top.indices.tolist()]
    assert [share(line[-1]) for line in lines] == pytest.approx(top.values.tolist(), abs=6e-4)
    follows = shown.shares[5, shown.tokens[6]]
    rank = int((shown.shares[5] > follows).sum()) + 1
    said = tab.locator("#follows").inner_text()
    assert said.endswith(f"rank {rank}")
    assert share(re.search(r"with (.*), rank", said)[1]) == pytest.approx(follows.item(), abs=6e-4)
    tokens(tab).nth(shown.T - 1).hover()
    settle(tab)
    assert tab.locator("#follows").inner_text() == "The prompt ends here."


CONTRASTS = """() => {
    const parse = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => rgb.slice(0, 3).map(x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, at) => sum + x * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const color = parse(getComputedStyle(element).backgroundColor);
            if (color.length < 4 || color[3] === 1) return color;
        }
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || ["SCRIPT", "OPTION"].includes(element.tagName)) continue;
        const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
        found.push([(a + 0.05) / (b + 0.05), element.outerHTML.slice(0, 100)]);
    }
    return found.sort((x, y) => x[0] - y[0]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(shown, visit, scheme):
    tab = visit(shown.path, scheme=scheme)
    tab.locator("summary").click()
    for name in ("Attention", "Attribution", "Lens"):
        view(tab, name)
        found = tab.evaluate(CONTRASTS)
        assert len(found) > 60
        assert found[0][0] >= 4.5, found[0]
    view(tab, "Attention")
    assert pixel(tab, 20, 3) == pytest.approx(heat(shown.byte(1, 2, 20, 3), scheme == "dark"), abs=2)


def test_the_theme_can_be_chosen_and_is_remembered(shown, visit):
    tab = visit(shown.path, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    auto = tab.evaluate(paper)
    tab.locator("#theme").click()
    assert tab.evaluate(paper) != auto
    settle(tab)
    assert pixel(tab, 20, 3) == pytest.approx(heat(shown.byte(1, 2, 20, 3)), abs=2)
    tab.locator("#theme").click()
    assert tab.evaluate(paper) == auto
    assert tab.evaluate("localStorage.getItem('thinker-theme')") == "dark"


def test_names_and_roles(shown, visit):
    tab = visit(shown.path)
    grid = tab.get_by_role("grid", name="All heads")
    assert grid.get_by_role("gridcell").count() == 12
    assert grid.get_by_role("row").count() == 4
    assert grid.get_by_role("rowheader").all_inner_texts() == ["layer 0", "layer 1", "layer 2"]
    entropy = torch.special.entr(shown.weights[2, 1]).sum(dim=-1).mean()
    assert f"entropy {entropy:.2f}, " in cell(tab, 2, 1).get_attribute("aria-label")
    assert tab.get_by_role("group", name="Prompt").get_by_role("button").count() == shown.T
    assert tab.get_by_role("radio").count() == 5
    assert tab.locator("[aria-live=polite]").get_attribute("role") == "status"
    assert "Layer 1, head 2" in tab.get_by_role("img").first.get_attribute("aria-label")
    assert tab.locator("#grid [tabindex='0']").count() == tab.locator("#tokens [tabindex='0']").count() == 1
    unnamed = tab.locator("button, input, select").evaluate_all(
        "all => all.filter(one => !(one.ariaLabel || one.textContent || one.labels?.[0]?.textContent).trim())"
    )
    assert unnamed == []


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; \u2028 <!--blocks--> \u0000 ]]>"


def test_hostile_text_does_nothing(tmp_path, visit):
    shown = Shown(tmp_path, "ab")
    labels = [HOSTILE, "<!--", "`${alert(3)}`"]
    shown.explorer.facts["labels"][:] = labels
    shown.explorer.facts["names"] = dict.fromkeys(shown.explorer.facts["names"], HOSTILE)
    shown.explorer.facts["attribution"]["what"] = HOSTILE
    panel = reports.Panel(HOSTILE, torch.eye(2), [HOSTILE, "b"], ["<i>", HOSTILE])
    report = reports.Report({HOSTILE: HOSTILE}, [HOSTILE, "b"], [[HOSTILE, "2"]], {}, [panel], HOSTILE)
    page.write_page(shown.path, HOSTILE + "\udcff", report, shown.explorer)
    tab = visit(shown.path)
    for name in ("Attribution", "Lens", "Attention"):
        view(tab, name)
        tokens(tab).first.hover()
    assert tokens(tab).evaluate_all("all => all.map(one => one.textContent)") == labels
    assert tab.locator("img[src=x], td script").count() == 0
    told = HOSTILE.replace("\u0000", "")  # which no HTML can hold
    assert tab.locator("h1").evaluate("one => one.textContent") == told + "?"
    assert tab.locator("#report td").first.evaluate("one => one.textContent") == told


def test_more_than_a_page_holds(tmp_path, visit, monkeypatch):
    monkeypatch.setattr(page, "CELLS", 5 * page.cells(29, False))
    shown = Shown(tmp_path)
    assert len(shown.explorer.weights) == 5
    tab = visit(shown.path)
    assert tab.locator("#banner").inner_text() == (
        "29 tokens × 12 heads are more than one page holds: 5 heads can be opened, "
        "the others show thumbnails and scores only"
    )
    missing = next((n, h) for n in range(3) for h in range(4) if (n, h) not in shown.explorer.weights)
    cell(tab, *missing).click()
    settle(tab)
    assert "cannot be opened" in tab.locator("#not-held").inner_text()
    assert "cannot be opened" in tab.locator("#status").inner_text()
    assert pixel(tab, 20, 3) == pytest.approx(heat(shown.byte(*missing, 20, 3)), abs=2)
    held = next(iter(shown.explorer.weights))
    cell(tab, *held).click()
    settle(tab)
    assert tab.locator("#not-held").is_hidden()


def test_a_prompt_of_which_no_head_fits(tmp_path, monkeypatch):
    for ahead, attention in ((False, "full"), (True, "prefix(3)")):
        monkeypatch.setattr(page, "CELLS", page.cells(20, ahead) + 3)
        with pytest.raises(UserError, match="29 tokens; the longest that a page can show has 20"):
            Shown(tmp_path, attention=attention)
        Shown(tmp_path, "x" * 19, attention=attention)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_heads_are_chosen_evenly(layers, heads, data):
    count = data.draw(st.integers(1, layers * heads))
    around = data.draw(st.tuples(st.integers(0, layers - 1), st.integers(0, heads - 1)))
    found = page.spread(layers, heads, count, around)
    assert len(found) == count
    assert around in found
    by_layer = [sum(layer == at for at, _ in found) for layer in range(layers)]
    assert max(by_layer) - min(by_layer) <= 1


def test_thumbnails_keep_the_largest(tmp_path):
    shown = Shown(tmp_path, "x" * 60)
    small = shown.explorer.thumbnails  # (layers, H, 48, 48) of 61 x 61
    assert small.shape == (3, 4, 48, 48)
    assert small[1, 2, 47, 47].item() == max(shown.byte(1, 2, query, key) for query in (59, 60) for key in (59, 60))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"n_layers": 1, "n_heads": 1, "n_kv_heads": 1}, "a"),
        ({"attention": "prefix(5)"}, TEXT),
        ({"attention": "window(4) | token(97)"}, TEXT),
        ({"attention": "linear(16)"}, TEXT),
        ({"attention": "topk(3)", "sink_logits": True}, TEXT),
        ({"attention": "full", "positions": "learned"}, "x" * 60),
    ],
)
def test_every_form_of_model(tmp_path, visit, shape, text):
    shown = Shown(tmp_path, text, **shape)
    page.write_page(shown.path, "a model", None, shown.explorer)
    tab = visit(shown.path)
    last = shown.T - 1
    assert pixel(tab, last, 1) == pytest.approx(heat(shown.byte(0, 0, last, 1)), abs=2)
    if shown.explorer.facts["ahead"]:
        assert shown.byte(0, 0, 1, 4) > 0
        assert pixel(tab, 1, 4) == pytest.approx(heat(shown.byte(0, 0, 1, 4)), abs=2)
    for name in ("Attribution", "Lens", "Attention"):
        view(tab, name)
        tokens(tab).first.hover()
        if name == "Attribution" and "token" in str(shape.get("attention")):
            assert "No attribution to tokens" in tab.locator("#meaning").inner_text()
    tokens(tab).last.click()
    for sides in tab.evaluate("state.sides.map(side => side.tokens.map(([token]) => token))"):
        assert len(sides) <= 36
        assert sides == sorted(set(sides))


def test_a_vocabulary_smaller_than_what_is_listed(tmp_path, visit):
    thinker, tokenizer = random_thinker(vocab_size=4), make_tokenizer("byte", [])
    tokenizer.prompt_start = []  # its own begins texts with an id that the model lacks
    prompt = reports.Prompt(torch.tensor([1, 2, 3, 1]), ["a", "b", "c", "a"])
    page.write_page(tmp_path / "p.html", "small", None, page.gather(thinker, tokenizer, prompt), view="lens")
    tab = visit(tmp_path / "p.html")
    assert tab.locator("#next li").count() == 4
    assert tab.locator("#lens-card").is_visible()


def test_a_pruned_model(tmp_path, visit):
    left, tokenizer = pruning.prune(random_thinker(vocab_size=257, n_kv_heads=4), [(0, 1)]), make_tokenizer("byte", [])
    prompt = reports.Prompt.read(left, tokenizer, "abc abc")
    explorer = page.gather(left, tokenizer, prompt)
    page.write_page(tmp_path / "p.html", "pruned", reports.measure_heads(left, prompt), explorer)
    tab = visit(tmp_path / "p.html")
    assert [tab.get_by_role("gridcell", name="pruned").count(), tab.get_by_role("gridcell").count()] == [1, 8]
    tab.get_by_role("gridcell", name="pruned").click()
    tokens(tab).nth(4).click()


def test_a_report_alone_and_beside_the_rest(tmp_path, shown, visit):
    report = reports.measure_heads(shown.thinker, None)
    page.write_page(tmp_path / "r.html", "scores", report, None)
    tab = visit(tmp_path / "r.html")
    assert tab.locator("#tokens").count() == 0
    table = tab.get_by_role("table")
    assert table.get_by_role("columnheader").all_inner_texts() == report.columns
    assert table.get_by_role("row").count() == 1 + len(report.rows)
    assert table.locator("tbody tr").nth(5).locator("td").all_inner_texts() == report.rows[5]
    drawn = tab.get_by_alt_text("A picture of what the table says")
    assert drawn.evaluate("one => one.complete && one.naturalWidth") > 500
    page.write_page(tmp_path / "b.html", "both", reports.map_head(shown.thinker, shown.prompt, 0, 0), shown.explorer)
    both = visit(tmp_path / "b.html")
    assert both.get_by_alt_text("A picture of what the table says").count() == 1
    assert tokens(both).count() == shown.T


def test_a_narrow_screen_does_not_scroll_sideways(tmp_path, shown, visit):
    report = reports.map_head(shown.thinker, shown.prompt, 0, 0)
    page.write_page(tmp_path / "p.html", "a model with a long name " * 4, report, shown.explorer)
    tab = visit(tmp_path / "p.html", width=360)
    for name in ("Attention", "Attribution", "Lens"):
        view(tab, name)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.set_viewport_size({"width": 90, "height": 900})  # nothing to be read, but nothing to fail either
    settle(tab)


def test_it_cannot_be_written(shown, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*: No such file"):
        page.write_page(tmp_path / "no" / "x.html", "x", None, shown.explorer)


def test_logits_that_are_not_finite(shown, tmp_path):
    thinker = random_thinker(vocab_size=257)
    thinker.head.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        page.gather(thinker, shown.tokenizer, shown.prompt)


def test_the_prediction_can_be_chosen(shown):
    found = page.gather(shown.thinker, shown.tokenizer, shown.prompt, target=97, against=98, position=4).facts
    parts = attribution.direct_logit_attribution(shown.thinker, shown.tokens, 97, 98, 4)
    assert found["attribution"]["what"] == "logit of ‘a’ rather than ‘b’ after position 4"
    assert found["attribution"]["y"] == pytest.approx(parts.y)
    assert json.dumps(found)
