"""The report in a real Chromium and in a Markdown parser: whole, exact, and safe whatever text it
holds."""

from dataclasses import replace

import chromium
import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from conftest import random_model
from training_runs import read_metrics

from thinker.features.run_report.attention_picture import AttentionPicture, transparent_png
from thinker.features.run_report.history import History, Point, spread, thin
from thinker.features.run_report.loss_curves import loss_curves
from thinker.features.run_report.report_facts import ReportFacts, Table
from thinker.features.run_report.report_html import html_page
from thinker.features.run_report.report_markdown import markdown_page
from thinker.training.reports.run_summary import RunSummary

browser = chromium.browser
WIDTHS = (360, 768, 1280)
# Text that ends elements, attributes, tables and code blocks; that turns the direction of writing;
# that controls a terminal; half a character; a very long word.
HOSTILE = {
    "script": "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>",
    "pre": "</pre></section><h1>gone</h1> <!-- <title>",
    "quotes": '" onclick="window.evil = 1" \' &lt; &amp;',
    "markdown": "```\n# not a title\n````\n| a | b |\n[x](javascript:evil) **bold** <b>b</b>",
    "directions": "\u202eright to left\u2066 שלום עולם العربية",
    "controls": "a\x00b\x1b[31mred\x07\x7f\x9b end",
    "half": "half a character \udce9 and a tab\t.",
    "long": "w" * 3000,
    "slots": "<!--style--> <!--samples-->",
}
SHOWN = {
    "\x00": "\\x00",
    "\x1b": "\\x1b",
    "\x07": "\\x07",
    "\x7f": "\\x7f",
    "\x9b": "\\x9b",
    "\udce9": "?",
}


def as_shown(text):
    """The text that a reader sees."""
    return "".join(SHOWN.get(character, character) for character in text)


def a_history(n_steps=50, floor=0.9):
    """A run whose losses are 5 / step and 6 / step."""
    history = History()
    for step in range(1, n_steps + 1):
        history.add({"step": step, "train_loss": 0.5 + 5 / step, "tokens_per_second": 1e4})
        if step % 10 == 0:
            line = {"step": step, "tokens": 100 * step, "val_loss": 1 + 6 / step, "elapsed_s": step}
            line |= {"val_bits_per_byte": (1 + 6 / step) / 2, "entropy_floor": floor}
            history.add(line)
    return history


SUMMARY = RunSummary(
    result=["finished"],
    verdict="underfitted",
    fit="",
    comparison="",
    estimates="",
    advice=["train longer"],
    next_commands=["sample from it: thinker-generate x"],
    baselines={"5-gram": 1.5, "xz": 1.75, "gzip": 2.0},
    values={},
)


def some_facts(text="plain"):
    """Facts with a text wherever a text may come from outside."""
    history = a_history()
    table = Table(text, [], [["name", text], [text, "1"]])
    tokens = torch.arange(16)[None]
    weights = random_model(vocab_size=257, n_layers=3).attention_weights(tokens)[:, 0]
    return ReportFacts(
        title=text,
        status="finished",
        status_text=text,
        progress=1.0,
        key_numbers=[["validation loss", text]],
        result=[text],
        assessment=[text],
        advice=[text],
        next_commands=[f"sample from it: {text}"],
        curves=loss_curves(history, SUMMARY),
        evaluations=Table("The numbers", ["step", text], [["10", "1.6"], ["20", text]], text),
        model=table,
        speed=table,
        data=Table("Data", ["", text], [["tokens", "5"]], text),
        config=Table("Settings", ["key", "value", "default"], [["run.dir", text, "null"]], text),
        machine=table,
        samples=[
            {"step": 10, "prompt": text, "text": text},
            {"step": 20, "prompt": "", "text": text},
        ],
        n_samples=2,
        attention=AttentionPicture([text] * 16, weights),
        words=Table("What the words mean", [], [[text, text]]),
    )


class Visits:
    """Opens pages, and keeps what they asked for and complained of."""

    def __init__(self, browser):
        self.browser = browser
        self.asked, self.faults = [], []

    def open(self, path, width=1280, scheme="light", scripts=True):
        """A new tab with a page."""
        context = self.browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
        )
        tab = context.new_page()
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.on("console", lambda message: self.faults.append(message.text))
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.goto(path.as_uri())
        return tab


@pytest.fixture
def visits(browser):
    kept = Visits(browser)
    yield kept
    for context in browser.contexts:
        context.close()
    assert kept.faults == []
    others = [url for url in kept.asked if not url.startswith(("file:", "data:"))]
    assert others == []
    assert len({url for url in kept.asked if url.startswith("file:")}) == 1


@pytest.fixture(scope="module")
def real(tiny_run):
    """A real run with its report."""
    return tiny_run


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_run_fits_and_says_what_it_should(real, visits, width):
    papers = []
    for scheme in ("light", "dark"):
        tab = visits.open(real / "report.html", width, scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        papers.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.title() == real.name
        for name in (
            "Result",
            "Loss",
            "What was trained",
            "Samples over time",
            "Data",
            "Attention",
        ):
            assert tab.get_by_role("heading", name=name, exact=True).is_visible()
        violations = Axe().run(tab).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []
    assert papers == ["rgb(246, 246, 243)", "rgb(18, 20, 23)"]


def test_the_chart_says_the_numbers_under_the_pointer(real, visits):
    tab = visits.open(real / "report.html")
    lines = {line["step"]: line for line in read_metrics(real) if "train_loss" in line}
    evaluated = {line["step"]: line for line in read_metrics(real) if "val_loss" in line}
    chart = tab.locator("#chart")
    box = chart.bounding_box()
    first, last = min(lines), max(lines)
    assert tab.locator("#tip").is_hidden()
    for step in (first, 12, 17, last):
        place = (step - first) / (last - first) * box["width"]
        chart.hover(position={"x": min(max(place, 1), box["width"] - 1), "y": 40})
        said = tab.locator("#tip").inner_text().split("\n")
        assert said[0] == f"step {step}"
        assert said[1] == f"training {lines[step]['train_loss']:.4f}"
        nearest = min(evaluated, key=lambda at: (abs(at - step), at))
        wanted = f"validation {evaluated[nearest]['val_loss']:.4f}"
        assert said[2] in (wanted, f"{wanted} (step {nearest})")
        assert (said[2] == wanted) == (nearest == step)
    tab.mouse.move(1, 1)
    assert tab.locator("#tip").is_hidden()


def test_without_scripts_the_numbers_are_there(real, visits):
    tab = visits.open(real / "report.html", scripts=False)
    for fold in tab.locator("summary").all():
        fold.click()
    for line in read_metrics(real):
        if "val_loss" in line:
            cell = tab.get_by_role("cell", name=f"{line['val_loss']:.4f}", exact=True)
            assert cell.first.is_visible()
    assert tab.locator("#theme").is_hidden()


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_breaks_the_page(name, tmp_path, visits):
    text = HOSTILE[name]
    path = tmp_path / "report.html"
    path.write_bytes(html_page(some_facts(text)).encode())
    for width in WIDTHS:
        tab = visits.open(path, width)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate("window.evil") is None
        assert (
            tab.evaluate("document.querySelectorAll('[onclick], [onerror], h1 ~ h1').length") == 0
        )
        assert tab.locator("h1").all_text_contents() == [as_shown(text)]
        assert tab.locator("main > *, .columns > *").count() == 12
        samples = tab.locator("#samples ~ pre").all_text_contents()
        # HTML drops a newline at the start, and has one kind of newline.
        assert samples == [as_shown(text + text), as_shown(text)]
        assert tab.locator("#chart .curve").count() == 2


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_breaks_the_markdown(name):
    markdown_it = pytest.importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    plain = parser.parse(markdown_page(some_facts()))
    text = HOSTILE[name]
    page = markdown_page(some_facts(text))
    page.encode()
    tokens = parser.parse(page)
    assert [token.type for token in tokens] == [token.type for token in plain]
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {
        "text",
        "text_special",
        "softbreak",
        "code_inline",
        "image",
        "strong_open",
        "strong_close",
        "entity",
    }
    blocks = [token.content for token in tokens if token.type == "fence"]
    assert blocks[1:] == [as_shown(text + text) + "\n", as_shown(text) + "\n"]


# ---------------------------------------------------------------- numbers


def test_points_are_means_of_neighbors():
    steps = np.arange(1, 1001)
    losses = (steps % 7).astype(float)
    few = thin(steps, losses, 400)
    assert len(few) == 334
    assert few[0] == Point(3, 2.0)
    assert few[-1] == Point(1000, float(1000 % 7))
    assert thin(steps[:400], losses[:400], 400) == list(
        zip(steps[:400].tolist(), losses[:400].tolist())
    )
    assert thin(steps[:0], losses[:0]) == []
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]


def test_axes_hold_all_losses_and_ticks_are_round():
    for floor in (0.9, 0.001):
        chart = loss_curves(a_history(floor=floor), SUMMARY)
        places = [chart.y(loss) for curve in chart.curves for _, loss in curve.points]
        places += [chart.y(level.loss) for level in chart.levels]
        assert all(0 <= place <= 1 for place in places)
        assert {level.kind: level.loss for level in chart.levels} == {
            "floor": floor,
            "ngram": 3.0,
            "gzip": 4.0,
        }
        assert chart.is_log
        assert 3 <= len(chart.loss_ticks()) <= 8
        assert chart.step_ticks() == [20, 40]
    flat = History()
    flat.add({"step": 5, "train_loss": 2.0, "tokens_per_second": 1.0})
    chart = loss_curves(flat, None)
    assert chart.x(5) == 0
    assert chart.y(2.0) == pytest.approx(0.5)
    assert loss_curves(History(), None) is None


def test_the_png_holds_the_roots_of_the_weights(tmp_path):
    image = pytest.importorskip("PIL.Image")
    weights = torch.rand(9, 9).tril()
    path = tmp_path / "head.png"
    path.write_bytes(transparent_png(weights))
    opened = image.open(path)
    pixels = torch.frombuffer(bytearray(opened.tobytes()), dtype=torch.uint8).view(9, 9, 4)
    assert torch.equal(pixels[:, :, 3].float(), (255 * weights.sqrt()).round())
    assert (pixels[:, :, :3] == torch.tensor([58, 134, 212], dtype=torch.uint8)).all()


def test_pruned_heads_and_many_layers(tmp_path, visits):
    weights = torch.rand(20, 15, 16, 16).tril()
    weights[3, 5] = torch.nan
    facts = replace(some_facts(), attention=AttentionPicture(["a"] * 16, weights))
    path = tmp_path / "report.html"
    path.write_text(html_page(facts))
    tab = visits.open(path)
    assert tab.get_by_text("12 of 20 layers (rows) and 12 of 15 heads.").is_visible()
    assert tab.locator(".heads > *").count() == 144
    shares = tab.locator(".pictures tbody tr")
    assert shares.count() == 20
    assert "nan" not in "".join(shares.all_inner_texts())
