"""The playground in a real Chromium, in front of a real server: writing, and what is sent for each
control."""

import re

import playground_fixtures
import pytest
from playground_fixtures import WRITTEN, chunk, color
from playwright.sync_api import expect

from thinker.serving.playground import playground_page

browser, api, tab = (
    playground_fixtures.browser,
    playground_fixtures.api,
    playground_fixtures.tab,
)  # fixtures
PROMPT = "Once upon a time"


def test_the_page_is_self_contained():
    page = playground_page()
    assert (
        re.findall(
            r"https?://|<link(?! rel=\"icon\" href=\"data:,\")|<script src|@import|url\(", page
        )
        == []
    )
    assert "default-src 'none'" in page
    assert "connect-src 'self'" in page
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|srcdoc", page)
        == []
    )


def test_continuing_shows_what_the_server_computes(tab, api):
    page = tab(prompt=PROMPT, seed=7, max_tokens=24, logprobs=3).proceed()
    body = WRITTEN | {
        "model": api.plain,
        "prompt": PROMPT,
        "seed": 7,
        "max_tokens": 24,
        "logprobs": 3,
    }
    assert page.sent == [body]
    alone = (
        {key: value for key, value in body.items() if key != "stream_options"}
        | {"stream": False}
        | api.endless
    )
    [choice] = api.get("/v1/completions", alone)["choices"]
    shown = page.state()
    assert [token for token, _, _ in shown] == choice["token_ids"]
    assert [logprob for _, logprob, _ in shown] == pytest.approx(
        choice["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert [where for _, _, where in shown] == [color(logprob) for _, logprob, _ in shown]
    vocabulary = api.vocabulary(api.plain)
    text = b"".join(vocabulary[token] for token in choice["token_ids"]).decode(errors="replace")
    assert page.text().removesuffix("\ufffd") == (PROMPT + text).removesuffix("\ufffd")
    assert page.paper.evaluate("box => box.textContent") == page.text()
    assert re.search(
        r"first after \d+ ms · then [\d.]+ tokens/s · context \d+ of",
        page.page.locator(".stats").first.inner_text(),
    )


def test_every_setting_is_sent(tab):
    page = tab(prompt=PROMPT)
    page.page.get_by_text("More sampling").click()
    page.page.get_by_text("Advanced").click()
    values = {
        "Temperature": 0.55,
        "Max tokens": 9,
        "Top-p": 0.9,
        "Seed": 12,
        "Alternatives": 2,
        "Top-k": 40,
        "Min-p": 0.02,
    }
    values |= {"Repetition penalty": 1.1, "Presence penalty": 0.3, "Frequency penalty": -0.2}
    for name, value in values.items():
        page.field(name).fill(str(value))
    page.field("Stop strings").fill("###\n\\n\\n")
    page.field("JSON schema").fill('{"type": "object"}')
    page.reply(chunk([1], prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    [body] = page.sent
    sent = {
        "temperature": 0.55,
        "max_tokens": 9,
        "top_p": 0.9,
        "seed": 12,
        "logprobs": 2,
        "top_k": 40,
        "min_p": 0.02,
    }
    sent |= {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "stop": ["###", "\n\n"],
    }
    assert {name: body[name] for name in sent} == sent
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.button("Reset").click()
    page.reply(chunk([1]), "[DONE]")
    page.proceed()
    # Tokens go on as they are, because a text that has slid begins without a BOS token.
    sent = WRITTEN | {"add_special_tokens": False}
    assert page.sent[1].keys() == sent.keys() | {"model", "prompt"}
    assert sent.items() <= page.sent[1].items()


def test_a_slider_moves_with_its_number(tab):
    page = tab(prompt=PROMPT)
    slider = page.field("Temperature, slider")
    page.field("Temperature").fill("1.5")
    expect(slider).to_have_value("1.5")
    slider.fill("0.25")
    expect(page.field("Temperature")).to_have_value("0.25")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Temperature", "-1"),
        ("Top-p", ""),
        ("Top-k", "0"),
        ("Max tokens", "1e99"),
        ("JSON schema", "{"),
    ],
)
def test_a_setting_that_is_wrong_is_shown_and_not_sent(tab, name, value):
    page = tab(prompt=PROMPT)
    page.page.locator("#settings summary").evaluate_all("all => all.forEach(one => one.click())")
    page.field(name).fill(value)
    page.page.locator("#settings summary").evaluate_all("all => all.forEach(one => one.click())")
    page.button("Continue").click()
    expect(page.field(name)).to_be_focused()
    assert page.field(name).get_attribute("aria-invalid") == "true"
    assert page.sent == []


@pytest.mark.parametrize("by_key", [False, True])
def test_stop_ends_the_stream_and_keeps_the_text(tab, by_key):
    page = tab(prompt=PROMPT, max_tokens=100_000)
    page.button("Continue").click()
    page.tokens.nth(20).wait_for()
    assert page.page.evaluate("write.isBusy")
    if by_key:
        page.page.keyboard.press("Escape")
    else:
        page.button("Stop").click()
    count = page.settled().tokens.count()
    assert 20 < count < 100_000
    assert page.page.evaluate("write.drafts[0].view.tokens.length") == count
    assert "stopped" in page.page.locator(".stats").first.inner_text()
    assert page.error.count() == 0


def test_continuing_again_sends_the_ids_of_the_text(tab, api):
    page = tab(prompt=PROMPT, max_tokens=8).proceed()
    before, start = page.state(), page.page.evaluate("write.drafts[0].promptIds")
    page.proceed()
    assert page.sent[1]["prompt"] == [*start, *(token for token, _, _ in before)]
    assert page.state()[:8] == before
    assert len(page.state()) == 16
    page.button("Regenerate").click()
    page.settled()
    assert page.sent[2]["prompt"] == page.sent[1]["prompt"]
    assert page.state()[:8] == before
    assert page.paper.evaluate("box => box.textContent") == page.text()


def test_a_seed_can_be_reused(tab):
    page = tab(prompt=PROMPT, max_tokens=16).proceed()
    first = page.state()
    link = "linkParameters().get('seed')"
    assert page.page.evaluate(link) is None
    page.button("Reuse seed", exact=False).click()
    assert page.page.evaluate(link) == page.field("Seed").input_value()
    assert re.fullmatch(r"\d+", page.field("Seed").input_value())
    page.button("Regenerate").click()
    page.settled()
    assert page.state() == first
    assert [body["seed"] for body in page.sent] == [None, int(page.field("Seed").input_value())]


def test_an_alternative_replaces_a_token_and_what_follows(tab):
    page = tab(prompt=PROMPT, max_tokens=12, seed=3).proceed()
    before, start = page.state(), page.page.evaluate("write.drafts[0].promptIds")
    page.tokens.nth(5).hover()
    popover = page.page.locator("#popover")
    lines = popover.get_by_role("button")
    alternatives = page.page.evaluate(
        "write.drafts[0].view.tokens[5].alternatives.map(({id, logprob}) => [id, logprob])"
    )
    assert lines.count() == len(alternatives) >= 5
    assert alternatives == sorted(alternatives, key=lambda pair: -pair[1])
    at = next(at for at, (token, _) in enumerate(alternatives) if token != before[5][0])
    lines.nth(at).click()
    page.settled()
    chosen, logprob = alternatives[at]
    assert page.sent[1]["prompt"] == [*start, *(token for token, _, _ in before[:5]), chosen]
    assert page.state()[:5] == before[:5]
    assert page.paper.evaluate("box => box.textContent") == page.text()
    assert page.state()[5] == [chosen, pytest.approx(logprob), color(logprob)]
    assert len(page.state()) == 6 + 12
    assert popover.is_hidden()
    page.button("Undo").click()
    expect(page.tokens).to_have_count(12)
    assert page.state() == before
    assert page.paper.evaluate("box => box.textContent") == page.text()


def test_the_popover_shows_probability_and_rank(tab):
    page = tab(prompt=PROMPT, max_tokens=30, logprobs=4, temperature=1, seed=2).proceed()
    shown = page.page.evaluate(
        """write.drafts[0].view.tokens.map(({id, logprob, alternatives}) =>
            [logprob, alternatives.findIndex(other => other.id === id), alternatives.length])"""
    )
    for at, (logprob, rank, count) in list(enumerate(shown))[::7]:
        page.tokens.nth(at).click()
        text = page.page.locator("#popover").inner_text()
        share = 100 * 2.718281828459045**logprob
        assert f"{share:.2f}%" in text or f"{share:.1f}%" in text or "< 0.01%" in text
        assert 0 <= rank < count <= 5
        page.page.keyboard.press("Escape")
        assert (f"rank {rank + 1} of the {count} shown" if rank < 4 else "rank 5 or lower") in text
        expect(page.page.locator("#popover")).to_be_hidden()
    page.tokens.nth(0).click()
    page.page.mouse.move(2, 2)
    expect(page.page.locator("#popover")).to_be_visible()  # a click keeps it open
    page.paper.locator(".plain").click()
    expect(page.page.locator("#popover")).to_be_hidden()
    assert page.tokens.count() == 30  # this click did nothing else
    page.tokens.nth(2).hover()
    expect(page.page.locator("#popover")).to_be_visible()
    page.page.mouse.move(2, 2)
    expect(page.page.locator("#popover")).to_be_hidden()


def test_alternatives_come_in_order_and_without_doubles(tab):
    page = tab(prompt=PROMPT, logprobs=3)
    top = {"token_id:5": -3, "token_id:9": -0.5, "token_id:7": -1, "token_id:4": -6}
    logprobs = {"token_logprobs": [-6], "top_logprobs": [top]}
    page.reply(chunk([4], prompt_token_ids=[0], logprobs=logprobs), "[DONE]")
    page.proceed()
    assert page.page.evaluate("write.drafts[0].view.tokens[0].alternatives.map(({id}) => id)") == [
        9,
        7,
        5,
        4,
    ]
    page.tokens.first.click()
    assert "rank 4 or lower" in page.page.locator("#popover").inner_text()
    assert page.page.locator("#popover [aria-current]").count() == 1


def test_a_text_that_is_longer_than_the_context_goes_on(tab, api):
    page = tab(prompt=PROMPT)
    limit = page.page.evaluate("write.drafts[0].model.context_length")
    page.field("Max tokens").fill(str(limit + 10))
    page.proceed()
    ids = page.page.evaluate("write.drafts[0].ids")
    page.field("Max tokens").fill("4")
    page.proceed()
    assert page.sent[1]["prompt"] == ids[-limit:]
    assert page.error.count() == 0
    assert "(sliding)" in page.page.locator(".stats").first.inner_text()


def test_edited_text_is_plain_and_is_sent_as_text(tab):
    page = tab(prompt=PROMPT, max_tokens=6).proceed()
    whole = page.editable_text()
    page.paper.locator(".plain").click()
    expect(page.field("Text")).to_be_focused()
    assert page.field("Text").input_value() == whole
    assert page.tokens.count() == 0
    page.page.keyboard.type(" and so")
    page.proceed()
    assert page.sent[1]["prompt"] == f"{whole} and so"
    page.button("Clear").click()
    expect(page.field("Text")).to_have_value("")
    page.button("Undo").click()
    assert page.text() == page.page.evaluate(
        "write.drafts[0].view.text"
    )  # the tokens are back, not the text area
    for _ in range(3):
        page.button("Undo").click()
    expect(page.field("Text")).to_have_value(PROMPT)
    expect(page.button("Undo")).to_be_disabled()


def test_copying(tab):
    page = tab(prompt=PROMPT, max_tokens=6).proceed()
    page.button("Copy").dblclick()
    expect(page.button("Copied")).to_be_visible()
    assert page.page.evaluate("navigator.clipboard.readText()") == page.text()
    expect(page.button("Copied")).to_be_hidden()
    expect(page.button("Copy")).to_be_visible()


def test_undoing_twice_at_once(tab):
    """The second one finds nothing to undo. The tab fails for an error in the page."""
    page = tab(prompt=PROMPT, max_tokens=6).proceed()
    page.page.evaluate("Promise.all([write.undo(), write.undo()])")
    expect(page.field("Text")).to_have_value(PROMPT)
    expect(page.button("Undo")).to_be_disabled()


def test_a_character_of_several_tokens_comes_with_the_last(tab, api):
    vocabulary = api.vocabulary(api.plain)
    ids = [vocabulary.index(bytes([byte])) for byte in "é🙂".encode()]
    page = tab(prompt="A ")
    page.reply(
        chunk(ids[:3], prompt_token_ids=[0]),
        chunk(ids[3:5]),
        chunk(ids[5:], finish_reason="length"),
        "[DONE]",
    )
    page.proceed()
    assert page.text() == "A é🙂"
    assert page.tokens.all_inner_texts() == ["", "é", "", "", "", "🙂"]
    marks = page.tokens.evaluate_all("all => all.map(one => one.dataset.mark ?? '')")
    assert marks == [r"\xc3", "", r"\xf0", r"\x9f", r"\x99", ""]
    # Cut in the middle of a character, and continued: the character is whole.
    page.button("Clear").click()
    page.reply(chunk(ids[2:4], prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    assert page.text() == ""
    page.reply(chunk(ids[4:]), "[DONE]")
    page.proceed()
    assert page.text() == "🙂"
    assert page.sent[-1]["prompt"] == [0, *ids[2:4]]
    page.reply(chunk(ids[4:]), "[DONE]")
    page.button("Regenerate").click()
    page.settled()
    assert page.text() == "🙂"


def test_tokens_without_width_can_be_pointed_at(tab, api):
    vocabulary = api.vocabulary(api.plain)
    ids = [vocabulary.index(bytes([byte])) for byte in "a\u0657\u200d\n\n\r".encode()]
    page = tab(prompt="A")
    page.reply(chunk(ids, prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    assert page.text() == "Aa\u0657\u200d\n\n\r"
    for token in page.tokens.all():
        token.hover()
        expect(page.page.locator("#popover")).to_be_visible()


def test_text_is_never_markup(tab, api):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    vocabulary = api.vocabulary(api.plain)
    page = tab(prompt=evil)
    ids = [vocabulary.index(bytes([byte])) for byte in evil.encode()]
    page.reply(chunk(ids, prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    assert page.paper.evaluate("box => box.textContent") == evil + evil
    page.tokens.nth(0).click()
    assert page.page.locator("#work img, #work script, #popover img").count() == 0


def test_a_long_text_stays_whole_when_the_window_changes(tab, api):
    vocabulary = api.vocabulary(api.plain)
    word = next(
        token
        for token, text in enumerate(vocabulary)
        if len(text) > 3 and text.isascii() and text[:1] == b" "
    )
    page = tab(prompt="A")
    page.reply(
        chunk([word] * 3000, prompt_token_ids=[0]),
        *[chunk([word] * 100) for _ in range(10)],
        "[DONE]",
    )
    page.page.evaluate("window.drawn = new Set(), 0")
    page.proceed()
    text = "A" + 4000 * vocabulary[word].decode()
    assert page.tokens.count() == 4000
    for width in (700, 1300):
        page.page.set_viewport_size({"width": width, "height": 800})
        assert page.paper.evaluate("box => box.textContent") == text
    page.reply(*[chunk([word] * 50) for _ in range(10)], "[DONE]")
    page.proceed()
    page.page.set_viewport_size({"width": 900, "height": 800})
    page.page.evaluate("new Promise(requestAnimationFrame)")
    assert (
        page.paper.locator("> div").count() == 1
    )  # the window is narrower: all rows are one paragraph again
    assert page.paper.evaluate("box => box.textContent") == text + 500 * vocabulary[word].decode()
