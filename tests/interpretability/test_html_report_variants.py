"""The page of every kind of model, report, screen and text: it can be read, nothing fails, nothing
is loaded."""

import json

import html_report_fixtures
import pytest
import torch
from conftest import random_model
from html_report_fixtures import TEXT, Shown, cell, heat, pixel, tokens, view, wait_until_painted
from hypothesis import given, settings
from hypothesis import strategies as st

from thinker.data.tokenizers.tokenizer_factory import make_tokenizer
from thinker.interpretability import attribution, head_reports, html_report, prompt_reports, reports
from thinker.runtime.errors import RunError, UserError

browser, free_tabs = html_report_fixtures.browser, html_report_fixtures.free_tabs  # fixtures
shown, visit = html_report_fixtures.shown, html_report_fixtures.visit
pytestmark = pytest.mark.usefixtures("one_thread")

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
    assert pixel(tab, 20, 3) == pytest.approx(
        heat(shown.byte(1, 2, 20, 3), scheme == "dark"), abs=2
    )


def test_the_theme_can_be_chosen_and_is_remembered(shown, visit):
    tab = visit(shown.path, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    auto = tab.evaluate(paper)
    tab.locator("#theme").click()
    assert tab.evaluate(paper) != auto
    wait_until_painted(tab)
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
    assert (
        tab.locator("#grid [tabindex='0']").count()
        == tab.locator("#tokens [tabindex='0']").count()
        == 1
    )
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
    shown.explorer.facts["attribution"]["description"] = HOSTILE
    panel = reports.Panel(HOSTILE, torch.eye(2), [HOSTILE, "b"], ["<i>", HOSTILE])
    report = reports.Report(
        {HOSTILE: HOSTILE}, [HOSTILE, "b"], [[HOSTILE, "2"]], {}, [panel], HOSTILE
    )
    html_report.write_html_report(shown.path, HOSTILE + "\udcff", report, shown.explorer)
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
    monkeypatch.setattr(html_report, "MAX_WEIGHTS", 5 * 29 * 30 // 2)
    shown = Shown(tmp_path)
    assert len(shown.explorer.weights) == 5
    tab = visit(shown.path)
    assert tab.locator("#banner").is_visible()
    assert tab.locator("#banner").inner_text() == (
        "29 tokens × 12 heads are too many for one report: 5 heads can be opened; "
        "the others have only thumbnails and scores"
    )
    missing = next(
        (n, h) for n in range(3) for h in range(4) if (n, h) not in shown.explorer.weights
    )
    cell(tab, *missing).click()
    wait_until_painted(tab)
    assert tab.locator("#not-stored").is_visible()
    assert "does not store all heads" in tab.locator("#not-stored").inner_text()
    assert "is not stored" in tab.locator("#status").inner_text()
    assert pixel(tab, 20, 3) == pytest.approx(heat(shown.byte(*missing, 20, 3)), abs=2)
    held = next(iter(shown.explorer.weights))
    cell(tab, *held).click()
    wait_until_painted(tab)
    assert tab.locator("#not-stored").is_hidden()


def test_a_prompt_of_which_no_head_fits(tmp_path, monkeypatch):
    for fitting, attention in ((20 * 21 // 2, "full"), (20 * 20, "prefix(3)")):
        monkeypatch.setattr(html_report, "MAX_WEIGHTS", fitting + 3)
        with pytest.raises(UserError, match="29 tokens; an HTML report can show at most 20"):
            Shown(tmp_path, attention=attention)
        Shown(tmp_path, "x" * 19, attention=attention)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_heads_are_chosen_evenly(layers, heads, data):
    count = data.draw(st.integers(1, layers * heads))
    around = data.draw(st.tuples(st.integers(0, layers - 1), st.integers(0, heads - 1)))
    found = html_report.choose_heads(layers, heads, count, around)
    assert len(found) == count
    assert around in found
    by_layer = [sum(layer == at for at, _ in found) for layer in range(layers)]
    assert max(by_layer) - min(by_layer) <= 1


def test_thumbnails_keep_the_largest(tmp_path):
    shown = Shown(tmp_path, "x" * 60)
    small = shown.explorer.thumbnails  # (layers, H, 48, 48) of 61 x 61
    assert small.shape == (3, 4, 48, 48)
    assert small[1, 2, 47, 47].item() == max(
        shown.byte(1, 2, query, key) for query in (59, 60) for key in (59, 60)
    )


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"n_layers": 1, "n_heads": 1, "n_kv_heads": 1}, "a"),
        ({"attention": "prefix(5)"}, TEXT),
        ({"attention": "window(4) | token(97)"}, TEXT),
        ({"attention": "linear(16)"}, TEXT),
        ({"attention": "topk(3)", "attention_sinks": True}, TEXT),
        ({"attention": "full", "positions": "learned"}, "x" * 60),
    ],
)
def test_every_form_of_model(tmp_path, visit, shape, text):
    shown = Shown(tmp_path, text, **shape)
    html_report.write_html_report(shown.path, "a model", None, shown.explorer)
    tab = visit(shown.path)
    last = shown.T - 1
    assert pixel(tab, last, 1) == pytest.approx(heat(shown.byte(0, 0, last, 1)), abs=2)
    if shown.explorer.facts["bidirectional"]:
        assert shown.byte(0, 0, 1, 4) > 0
        assert pixel(tab, 1, 4) == pytest.approx(heat(shown.byte(0, 0, 1, 4)), abs=2)
    for name in ("Attribution", "Lens", "Attention"):
        view(tab, name)
        tokens(tab).first.hover()
        if name == "Attribution" and "token" in str(shape.get("attention")):
            assert "No contributions of tokens" in tab.locator("#meaning").inner_text()
    tokens(tab).last.click()
    for sides in tab.evaluate("state.sides.map(side => side.tokens.map(([token]) => token))"):
        assert len(sides) <= 36
        assert sides == sorted(set(sides))


def test_a_vocabulary_smaller_than_what_is_listed(tmp_path, visit):
    model, tokenizer = random_model(vocab_size=4), make_tokenizer("byte", [])
    tokenizer.bos_prefix = []  # its own begins texts with an id that the model lacks
    prompt = reports.Prompt(torch.tensor([1, 2, 3, 1]), ["a", "b", "c", "a"])
    html_report.write_html_report(
        tmp_path / "p.html",
        "small",
        None,
        html_report.make_explorer(model, tokenizer, prompt, view="lens"),
    )
    tab = visit(tmp_path / "p.html")
    assert tab.locator("#next li").count() == 4
    assert tab.locator("#lens-card").is_visible()


def test_a_report_alone_and_beside_the_rest(tmp_path, shown, visit):
    report = head_reports.report_heads(
        shown.model, None, head_reports.random_repeats(shown.model), "all"
    )
    html_report.write_html_report(tmp_path / "r.html", "scores", report, None)
    tab = visit(tmp_path / "r.html")
    assert tab.locator("#tokens").count() == 0
    table = tab.get_by_role("table")
    assert table.get_by_role("columnheader").all_inner_texts() == report.columns
    assert table.get_by_role("row").count() == 1 + len(report.rows)
    assert table.locator("tbody tr").nth(5).locator("td").all_inner_texts() == report.rows[5]
    drawn = tab.get_by_alt_text("plot of the report")
    assert drawn.evaluate("one => one.complete && one.naturalWidth") > 500
    html_report.write_html_report(
        tmp_path / "b.html",
        "both",
        prompt_reports.report_attention_map(shown.model, shown.prompt, 0, 0),
        shown.explorer,
    )
    both = visit(tmp_path / "b.html")
    assert both.get_by_alt_text("plot of the report").count() == 1
    assert tokens(both).count() == shown.T


def test_no_head_and_no_number_is_cut_off(tmp_path, visit):
    """On the width of a laptop and of a phone; the last number above a column lies inside its
    canvas."""
    wide = Shown(tmp_path, "abcdefghij" * 6, n_layers=2, n_heads=6, d_model=48, max_seq_len=64)
    for width, heads in ((1280, 6), (400, 6), (900, 6)):
        tab = visit(wide.path, width=width)
        box = tab.locator("#grid-box").bounding_box()
        for head in range(heads):
            place = tab.locator("[role=gridcell]").nth(head).bounding_box()
            assert box["x"] <= place["x"], (width, head)
            assert place["x"] + place["width"] <= box["x"] + box["width"], (width, head)
        inks = """() => {
            const canvas = document.querySelector("#map canvas"), height = Math.floor(17 * devicePixelRatio);
            const strip = canvas.getContext("2d").getImageData(canvas.width - 40, 0, 40, height).data;
            const inked = (x) => [...Array(height).keys()].some((y) => strip[4 * (40 * y + x) + 3]);
            return [inked(39), [...Array(39).keys()].some(inked)];
        }"""
        assert tab.evaluate(inks) == [False, True], width


def test_a_narrow_screen_does_not_scroll_sideways(tmp_path, shown, visit):
    report = prompt_reports.report_attention_map(shown.model, shown.prompt, 0, 0)
    html_report.write_html_report(
        tmp_path / "p.html", "a model with a long name " * 4, report, shown.explorer
    )
    tab = visit(tmp_path / "p.html", width=360)
    for name in ("Attention", "Attribution", "Lens"):
        view(tab, name)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.set_viewport_size(
        {"width": 90, "height": 900}
    )  # nothing to be read, but nothing to fail either
    wait_until_painted(tab)


def test_it_cannot_be_written(shown, tmp_path):
    with pytest.raises(FileNotFoundError):
        html_report.write_html_report(tmp_path / "no" / "x.html", "x", None, shown.explorer)


def test_logits_that_are_not_finite(shown, tmp_path):
    model = random_model(vocab_size=257)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="non-finite"):
        html_report.make_explorer(model, shown.tokenizer, shown.prompt)


def test_the_prediction_can_be_chosen(shown):
    found = html_report.make_explorer(
        shown.model, shown.tokenizer, shown.prompt, target=97, contrast_token=98, position=4
    ).facts
    parts = attribution.direct_logit_attribution(shown.model, shown.tokens, 97, 98, 4)
    assert found["attribution"]["description"] == "logit of ‘a’ rather than ‘b’ after position 4"
    assert found["attribution"]["logit"] == pytest.approx(parts.logit)
    assert json.dumps(found)
