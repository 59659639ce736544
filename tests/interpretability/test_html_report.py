"""The page in a real Chromium: whatever is clicked, hovered or typed, it shows what the model
computed."""

import re

import html_report_fixtures
import pytest
import torch
from html_report_fixtures import (
    STYLE,
    Shown,
    backgrounds,
    cell,
    heat,
    pixel,
    share,
    tokens,
    view,
    wait_until_painted,
)

from thinker.interpretability import attribution, html_report, reports

browser, free_tabs = html_report_fixtures.browser, html_report_fixtures.free_tabs  # fixtures
shown, visit = html_report_fixtures.shown, html_report_fixtures.visit
pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert tab.locator(".banner:visible").count() == 0


def test_a_click_on_a_head_shows_it(shown, visit):
    tab = visit(shown.path)
    assert tab.locator("#head-name").inner_text() == "Layer 1, head 2"
    for layer, head in ((1, 2), (2, 0), (0, 3)):
        cell(tab, layer, head).click()
        wait_until_painted(tab)
        assert tab.locator("#head-name").inner_text() == f"Layer {layer}, head {head}"
        assert cell(tab, layer, head).get_attribute("aria-selected") == "true"
        for query, key in ((20, 3), (9, 8), (5, 5), (12, 0)):
            assert pixel(tab, query, key) == pytest.approx(
                heat(shown.byte(layer, head, query, key)), abs=2
            )
    assert tab.locator("[role=gridcell][aria-selected=true]").count() == 1


def test_the_slider_goes_through_the_layers(shown, visit):
    tab = visit(shown.path)
    slider = tab.get_by_label("layer", exact=False).and_(tab.get_by_role("slider"))
    for key, layer in (("ArrowRight", 2), ("Home", 0)):
        slider.press(key)
        wait_until_painted(tab)
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
    wait_until_painted(tab)
    check(14)
    first = tab.locator("#tip").inner_text().split("\n")
    assert first[0] == f"14 {shown.prompt.labels[14]} attends to"
    value, key = re.match(r"(0\.\d+) +(\d+) ", first[1]).groups()
    assert int(key) == shown.weights[1, 2, 14].argmax()
    assert float(value) == pytest.approx(shown.weights[1, 2, 14].max().item(), abs=1 / 255 + 5e-4)
    assert f"token 14 {shown.prompt.labels[14]} attends to" in tab.locator("#status").inner_text()
    tab.mouse.move(1, 1)
    wait_until_painted(tab)
    check(9)
    assert tab.locator("#tip").is_hidden()
    tab.get_by_text("is attended to by").click()
    wait_until_painted(tab)
    check(9, column=True)


def test_a_locked_token_stays_until_escape(shown, visit):
    tab = visit(shown.path)
    tokens(tab).nth(17).click()
    locked = tokens(tab).nth(17)
    wait_until_painted(tab)
    kept = backgrounds(tab)
    assert locked.get_attribute("aria-pressed") == "true"
    tokens(tab).nth(4).hover()
    wait_until_painted(tab)
    assert backgrounds(tab) == kept
    value = float(tab.locator("#tip").inner_text().split("\n")[1])
    assert value == pytest.approx(shown.weights[1, 2, 17, 4].item(), abs=1 / 255 + 5e-4)
    tab.mouse.move(1, 1)
    wait_until_painted(tab)
    assert backgrounds(tab) == kept
    assert "(locked)" in tab.locator("#status").inner_text()
    tab.keyboard.press("Escape")
    tokens(tab).nth(4).hover()
    wait_until_painted(tab)
    assert backgrounds(tab) != kept
    assert locked.get_attribute("aria-pressed") == "false"


def test_the_heatmap_answers_the_pointer(shown, visit):
    tab = visit(shown.path)
    box = tab.evaluate("(({left, top, cw, ch}) => ({left, top, cw, ch}))(state.map)")
    place = {"x": box["left"] + 6.5 * box["cw"], "y": box["top"] + 12.5 * box["ch"]}
    tab.locator("#map canvas").hover(position=place)
    wait_until_painted(tab)
    said = tab.locator("#tip").inner_text().split("\n")
    assert said[0] == f"12 {shown.prompt.labels[12]} → 6 {shown.prompt.labels[6]}"
    assert float(said[1]) == pytest.approx(shown.weights[1, 2, 12, 6].item(), abs=1 / 255 + 5e-4)
    assert tab.locator("#map .cross:visible").count() == 2
    tab.locator("#map canvas").click(position=place)
    wait_until_painted(tab)
    assert tokens(tab).nth(12).get_attribute("aria-pressed") == "true"


def test_a_long_prompt_scrolls_to_the_token(tmp_path, visit):
    shown = Shown(tmp_path, "a long prompt " * 40, max_seq_len=1024, n_layers=1)
    html_report.write_html_report(shown.path, "long", None, shown.explorer)
    tab = visit(shown.path)
    inside = """token => {
        const [box, one] = [$("tokens"), $("tokens").children[token]].map(part => part.getBoundingClientRect());
        return one.top >= box.top && one.bottom <= box.bottom;
    }"""
    assert tab.evaluate(inside, shown.T - 1)
    assert not tab.evaluate(inside, 0)
    first, *_ = tab.evaluate("state.sides[1].tokens.map(([token]) => token)")
    tab.locator("#lines").click(position={"x": 320 - 34 - 10, "y": 10})
    wait_until_painted(tab)
    assert tokens(tab).nth(first).get_attribute("aria-pressed") == "true"
    assert tab.evaluate(inside, first)
    assert tab.evaluate("scrollY") == 0


def test_lines_answer_the_pointer(shown, visit):
    tab = visit(shown.path)
    before = tab.evaluate("$('lines').toDataURL()")
    x, y = 20, tab.evaluate("state.sides[0].tokens[21][1]")
    tab.locator("#lines").hover(position={"x": x, "y": y})
    wait_until_painted(tab)
    assert f"token 21 {shown.prompt.labels[21]} attends" in tab.locator("#status").inner_text()
    assert tab.evaluate("$('lines').toDataURL()") != before
    tab.locator("#lines").click(position={"x": x, "y": y})
    wait_until_painted(tab)
    assert tokens(tab).nth(21).get_attribute("aria-pressed") == "true"


def test_the_keyboard_alone_can_do_all(shown, visit):
    tab = visit(shown.path)

    def tab_to(selector):
        for _ in range(20):
            tab.keyboard.press("Tab")
            if tab.evaluate("selector => document.activeElement.matches(selector)", selector):
                assert (
                    tab.evaluate(
                        "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
                    )
                    >= 2
                    or "input" in selector
                )
                return
        raise AssertionError(f"{selector} is not reached")

    def press(*keys):
        for key in keys:
            tab.keyboard.press(key)
        wait_until_painted(tab)

    tab_to("#theme")
    tab_to("summary")
    press("Enter")
    assert tab.get_by_text("at most 1/255 off").is_visible()
    tab_to("#view input")
    tab_to("#direction input")
    tab_to("#tokens button")
    press("ArrowRight", "ArrowRight")
    assert f"token 11 {shown.prompt.labels[11]} attends to" in tab.locator("#status").inner_text()
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
    start = shown.tokenizer.bos_prefix[0]
    given, _, missed = attribution.integrated_gradients(
        shown.model, shown.tokens, target, baseline=start
    )
    parts = attribution.direct_logit_attribution(shown.model, shown.tokens, target)
    labels = tokens(tab).evaluate_all("all => all.map(one => one.ariaLabel)")
    found = [float(text.rsplit("contribution ", 1)[1].replace("−", "-")) for text in labels]
    assert found == pytest.approx(given.tolist(), abs=1e-3)
    what = f"logit of ‘{reports.token_label(shown.tokenizer, target)}’ after position {shown.T - 1}"
    assert what in tab.locator("#parts-what").inner_text()
    assert f"{parts.logit:.4f}" in tab.locator("#parts-what").inner_text()
    assert what in tab.locator("#meaning").inner_text()
    lines = tab.locator("#by-part li").all_inner_texts()
    listed = {line.split("\n")[0]: float(line.split("\n")[-1].replace("−", "-")) for line in lines}
    assert listed["head 2.1"] == pytest.approx(parts.heads[2, 1].item(), abs=1e-3)
    assert sum(listed.values()) == pytest.approx(parts.logit, abs=0.02)
    assert tab.locator("#parts-missed").is_visible() == (
        abs(missed) >= 0.05 * max(1, abs(given.sum() - missed))
    )
    most = backgrounds(tab)[int(given.abs().argmax())]
    sign = "plus" if given[given.abs().argmax()] > 0 else "minus"
    assert most == [
        int(re.search(rf"--{sign}: light-dark\(#(\w+)", STYLE)[1][at : at + 2], 16)
        for at in (0, 2, 4)
    ]
    tab.get_by_role("button", name="head 2.1").click()
    wait_until_painted(tab)
    assert tab.locator("#head-name").inner_text() == "Layer 2, head 1"


def test_lens(shown, visit):
    tab = visit(shown.path)
    view(tab, "Lens")
    lens = attribution.logit_lens(shown.model, shown.tokens).softmax(dim=-1)  # (layers + 1, T, V)
    tokens(tab).nth(6).click()
    tab.get_by_role("slider").press("ArrowLeft")
    wait_until_painted(tab)
    rows = tab.locator("#lens tbody tr")
    assert rows.count() == 4
    for depth in range(4):
        cells = (
            rows.nth(depth)
            .locator("td")
            .evaluate_all(
                "all => all.map(one => [one.firstChild.textContent, one.lastChild.textContent])"
            )
        )
        top = lens[depth, 6].topk(5)
        assert [text for text, _ in cells[:5]] == [
            reports.token_label(shown.tokenizer, t) for t in top.indices.tolist()
        ]
        wanted = [*top.values.tolist(), lens[depth, 6, shown.tokens[7]].item()]
        assert [share(number) for _, number in cells] == pytest.approx(wanted, abs=6e-4)
    assert rows.nth(2).get_attribute("class") == "at"
    follows = lens[2, torch.arange(shown.T - 1), shown.tokens[1:]]
    for value, color in zip(follows.tolist(), backgrounds(tab)):
        assert color == pytest.approx(heat(round(255 * value**0.5)), abs=2)


def test_what_comes_next(shown, visit):
    tab = visit(shown.path)
    tokens(tab).nth(5).hover()
    wait_until_painted(tab)
    top = shown.shares[5].topk(10)
    lines = [line.split("\n") for line in tab.locator("#next li").all_inner_texts()]
    assert [line[0] for line in lines] == [
        reports.token_label(shown.tokenizer, t) for t in top.indices.tolist()
    ]
    assert [share(line[-1]) for line in lines] == pytest.approx(top.values.tolist(), abs=6e-4)
    follows = shown.shares[5, shown.tokens[6]]
    rank = int((shown.shares[5] > follows).sum()) + 1
    said = tab.locator("#follows").inner_text()
    assert said.endswith(f"rank {rank})")
    assert share(re.search(r"\((.*), rank", said)[1]) == pytest.approx(follows.item(), abs=6e-4)
    tokens(tab).nth(shown.T - 1).hover()
    wait_until_painted(tab)
    assert tab.locator("#follows").inner_text() == "The prompt ends here."


def test_a_head_whose_weights_are_still_unpacked_is_loading(shown, visit):
    said = visit(shown.path).evaluate(
        """() => {
            const unpacked = [...matrices];
            matrices.clear();
            paintStatus();
            paintLines();
            const said = [$("status").textContent, $("lines-note").textContent];
            for (const [name, weights] of unpacked) matrices.set(name, weights);
            return said;
        }"""
    )
    assert said == ["Layer 1, head 2 is loading.", "Loading."]
