"""The playground for everyone: keyboard alone, screen readers, narrow windows, light and dark."""

import playground_fixtures
import pytest
from axe_playwright_python.sync_playwright import Axe
from playground_fixtures import chunk
from playwright.sync_api import expect

browser, api, tab = (
    playground_fixtures.browser,
    playground_fixtures.api,
    playground_fixtures.tab,
)  # fixtures
WIDTHS = (1280, 768, 360)
SCREENS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]


def check(page):
    """axe finds nothing, and nothing is wider than the window."""
    found = Axe().run(page.page)
    assert found.violations_count == 0, found.generate_report()
    assert page.page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_axe_finds_nothing_while_writing(tab, api, width, scheme):
    page = tab(width, scheme, prompt="Once upon a time", max_tokens=12, seed=1)
    check(page)
    page.page.locator("#settings summary").evaluate_all("all => all.forEach(one => one.click())")
    page.proceed()
    ids = page.page.evaluate("write.drafts[0].ids")
    for logprob in (-0.01, -0.4, -1, -2, -3, -4, -9):  # every color
        page.reply(chunk(ids[:3], logprob), "[DONE]")
        page.proceed()
    check(page)
    page.tokens.nth(3).click()
    expect(page.page.locator("#popover")).to_be_visible()
    check(page)
    page.reply({"error": {"message": "the queue is full"}})
    page.proceed()
    check(page)
    page.field("Compare").check()
    page.reply(chunk(ids[:3], prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    check(page)


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_axe_finds_nothing_in_a_chat(tab, api, width, scheme):
    page = tab(width, scheme, model=api.chat, tab="chat", max_tokens=12, seed=1)
    check(page)
    page.field("Message").fill("Hello " * 12)
    page.button("Send").click()
    page.settled("Send")
    page.page.locator(".assistant .token").first.click()
    expect(page.page.locator("#popover")).to_be_visible()
    check(page)
    page.page.locator("#chat").get_by_role("button", name="Edit").click()
    check(page)


def test_the_first_view_of_a_small_phone_has_all_buttons(tab, api):
    bottom = "one => one.getBoundingClientRect().bottom"
    for name, selector in (("write", "#clear"), ("chat", "#new-chat")):
        page = tab(360, model=api.chat, tab=name)
        page.page.set_viewport_size({"width": 360, "height": 640})
        assert page.page.locator(selector).evaluate(bottom) < 640


def test_the_keyboard_alone_writes_and_replaces_tokens(tab):
    page = tab(max_tokens=12)
    keyboard, popover = page.page.keyboard, page.page.locator("#popover")
    page.field("Text").focus()
    keyboard.type("Once")
    keyboard.press("Control+Enter")
    page.settled()
    expect(page.tokens).to_have_count(12)
    assert page.page.locator("#drafts .body [tabindex='0']").count() == 1
    keyboard.press("Escape")
    for _ in range(40):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.classList.contains('token')"):
            break
    expect(page.tokens.nth(0)).to_be_focused()
    expect(popover).to_be_visible()
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("End", 11),
        ("ArrowLeft", 10),
        ("Home", 0),
        ("ArrowLeft", 0),
    ):
        keyboard.press(key)
        expect(page.tokens.nth(at)).to_be_focused()
    assert page.page.locator("#drafts .body [tabindex='0']").count() == 1
    name = page.tokens.nth(0).get_attribute("aria-label")
    assert name.endswith("token 1 of 12")
    keyboard.press("Enter")
    lines = popover.get_by_role("button")
    expect(lines.nth(0)).to_be_focused()
    keyboard.press("ArrowDown")
    expect(lines.nth(1)).to_be_focused()
    keyboard.press("Escape")
    expect(page.tokens.nth(0)).to_be_focused()
    keyboard.press("Enter")
    keyboard.press("ArrowUp")
    expect(lines.last).to_be_focused()
    keyboard.press("Enter")
    page.settled()
    expect(page.tokens.nth(0)).to_be_focused()
    expect(page.tokens).to_have_count(13)
    assert len(page.sent) == 2


FOCUSED = """() => {
    const one = document.activeElement, box = one.getBoundingClientRect(), style = getComputedStyle(one);
    const isInside = box.width > 0 && box.left >= 0 && box.right <= innerWidth && box.top < innerHeight && box.bottom > 0;
    const name = one.id || one.ariaLabel || one.textContent.trim();
    return {name, isInside, hasRing: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2};
}"""


def stops(page):
    """The names of all stops of the Tab key, each of which is in the window and has a ring."""
    page.page.locator(".skip").focus()  # the first one
    names = []
    while not page.page.evaluate("document.activeElement === document.body"):
        found = page.page.evaluate(FOCUSED)
        assert found["isInside"], found
        assert found["hasRing"], found
        names.append(found["name"])
        page.page.keyboard.press("Tab")
    return names


def press_on(page, locator, key="Enter"):
    """Press a key on an element; then something still has the focus."""
    locator.focus()
    page.page.keyboard.press(key)
    assert page.page.evaluate("document.activeElement !== document.body")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tab_key_reaches_everything_in_sight(tab, api, width):
    page = tab(width)
    names = stops(page)
    assert names.index("prompt") < names.index("example") < names.index("continue")
    assert {"copy-link", "theme", "tab-write", "model", "compare", "clear", "colors"} <= {*names}
    assert {"setting-temperature", "setting-seed", "More sampling", "Advanced"} <= {*names}
    page = tab(width, model=api.chat, tab="chat")
    names = stops(page)
    assert names.index("system") < names.index("message") < names.index("send")
    assert {"chat-example", "new-chat", "tab-chat"} <= {*names}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_focus_is_never_lost_while_writing(tab, width):
    page = tab(width, max_tokens=4)
    press_on(page, page.page.locator("#example"))
    expect(page.field("Text")).to_be_focused()
    expect(page.field("Text")).not_to_have_value("")
    press_on(page, page.field("Text"))
    page.settled()
    expect(page.paper).to_be_focused()
    press_on(page, page.button("Regenerate"))
    page.settled()
    expect(page.paper).to_be_focused()
    press_on(page, page.button("Edit"))
    expect(page.field("Text")).to_be_focused()
    while page.button("Undo").is_enabled():
        press_on(page, page.button("Undo"))
    expect(page.field("Text")).to_be_focused()
    press_on(page, page.button("Clear"))
    expect(page.field("Text")).to_be_focused()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_focus_is_never_lost_in_a_chat(tab, api, width):
    page = tab(width, model=api.chat, tab="chat", max_tokens=4)
    message, talk = page.field("Message"), page.page.locator("#chat")
    press_on(page, page.page.locator("#chat-example"))
    expect(message).to_be_focused()
    press_on(page, message)
    page.settled("Send")
    expect(message).to_be_focused()
    press_on(page, page.button("Regenerate").last)
    page.settled("Send")
    expect(message).to_be_focused()
    edit = talk.get_by_role("button", name="Edit")
    press_on(page, edit)
    press_on(page, page.field("Edited message"), "Escape")
    expect(edit).to_be_focused()
    press_on(page, edit)
    press_on(page, page.field("Edited message"), "Control+Enter")
    page.settled("Send")
    expect(message).to_be_focused()
    press_on(page, page.button("New chat"))
    expect(message).to_be_focused()


def test_arrows_move_between_rows(tab):
    page = tab(360, prompt="Once", max_tokens=40, seed=1).proceed()
    page.tokens.nth(20).focus()
    place = "document.activeElement.getClientRects()[0].top + document.activeElement.closest('.body').scrollTop"
    before = page.page.evaluate(place)
    page.page.keyboard.press("ArrowDown")
    below = page.page.evaluate(place)
    assert below > before + 10
    page.page.keyboard.press("ArrowUp")
    assert page.page.evaluate(place) == pytest.approx(before, abs=2)


def test_a_screen_reader_hears_start_and_end(tab):
    page = tab(prompt="Once", max_tokens=60)
    page.page.evaluate(
        """() => { window.said = []; new MutationObserver(() => window.said.push($("status").textContent))
            .observe($("status"), {childList: true, characterData: true, subtree: true}); }"""
    )
    page.proceed()
    said = page.page.evaluate("window.said")
    assert said[0] == "Writing."
    assert said[1].endswith(("reached max tokens.", "the text ended."))
    assert len(said) == 2


def test_colors_can_be_switched_off(tab):
    page = tab(prompt="Once")
    page.reply(chunk([1], -9, prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    background = "one => getComputedStyle(one).backgroundColor"
    assert page.tokens.first.evaluate(background) != "rgba(0, 0, 0, 0)"
    page.field("Color tokens by probability").uncheck()
    assert page.tokens.first.evaluate(background) == "rgba(0, 0, 0, 0)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_high_contrast_shows_the_selected_tab_and_probabilities(tab, scheme):
    page = tab(scheme=scheme, prompt="Once")
    page.page.emulate_media(forced_colors="active", color_scheme=scheme)
    logprobs = (-0.01, -0.4, -1, -2, -3, -4, -9)  # every color
    page.reply(*[chunk([70], logprob, prompt_token_ids=[0]) for logprob in logprobs], "[DONE]")
    page.proceed()
    backgrounds = "all => all.map(one => getComputedStyle(one).backgroundColor)"
    for selector, count in (("[role=tab]", 2), ("#drafts .token", 7), ("#scale li", 7)):
        shown = page.page.locator(selector).evaluate_all(backgrounds)
        assert len(set(shown)) == len(shown) == count
    ink = "getComputedStyle(document.body).color"
    selected = page.page.get_by_role("tab", name="Write")
    assert selected.evaluate("one => getComputedStyle(one).color") != page.page.evaluate(ink)


def test_the_theme_can_be_chosen_and_is_kept(tab):
    page = tab(scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.page.evaluate(background)
    page.button("Theme: auto").click()
    light = page.page.evaluate(background)
    assert light != dark
    page.page.reload()
    assert page.button("Theme: light").is_visible()
    page.button("Theme: light").click()
    assert page.page.evaluate(background) == dark
