"""The playground in a real Chromium, in front of a real server: chat, two models, links, looking
inside, errors."""

import re

import playground_fixtures
import pytest
from playground_fixtures import DEFAULTS, chunk
from playwright.sync_api import expect

browser, api, tab = (
    playground_fixtures.browser,
    playground_fixtures.api,
    playground_fixtures.tab,
)  # fixtures


def contents(page, at=0):
    return page.page.evaluate(
        "at => chat.conversations[at].messages.map(({role, content}) => [role, content])", at
    )


def say(page, text):
    page.field("Message").fill(text)
    page.page.keyboard.press("Control+Enter")
    page.settled("Send")


def test_a_conversation(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=8, system="Be kind.")
    say(page, "Hello")
    body = DEFAULTS | {
        "model": api.chat,
        "max_completion_tokens": 8,
        "logprobs": True,
        "top_logprobs": 5,
    }
    system, first = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    assert page.sent == [body | {"messages": [system, first]}]
    [_, [role, answer]] = contents(page)
    assert role == "assistant"
    shown = page.page.locator(".assistant .message-text").evaluate("one => one.textContent")
    assert shown.rstrip("\ufffd") == answer.rstrip("\ufffd")  # the last character may be incomplete
    assert 1 <= page.page.locator(".assistant .token").count() <= 8
    page.page.locator(".assistant .token").first.click()
    expect(page.page.locator("#popover li")).not_to_have_count(0)
    assert (
        page.page.locator("#popover button").count() == 0
    )  # an answer cannot be continued from its middle
    say(page, "And then?")
    second = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    assert page.sent[1]["messages"] == [system, first, *second]
    assert [role for role, _ in contents(page)] == ["user", "assistant"] * 2


def test_enter_sends_and_shift_enter_begins_a_line(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    page.field("Message").fill("One")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("Two")
    assert page.sent == []
    page.page.keyboard.press("Enter")
    page.settled("Send")
    assert contents(page)[0] == ["user", "One\nTwo"]


def test_regenerating_and_editing_messages(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=6)
    for text in ("One", "Two"):
        say(page, text)
    before = contents(page)
    page.button("Regenerate").nth(1).click()
    page.settled("Send")
    assert page.sent[2] == page.sent[1]
    assert page.sent[2]["seed"] is None  # so that the server draws another
    assert contents(page)[:3] == before[:3]
    page.page.locator("#chat").get_by_role("button", name="Edit").first.click()
    expect(page.field("Edited message")).to_be_focused()
    page.field("Edited message").fill("Zero")
    page.button("Cancel").click()
    assert contents(page)[0] == ["user", "One"]
    page.page.locator("#chat").get_by_role("button", name="Edit").first.click()
    page.field("Edited message").fill("Zero")
    page.button("Send edited").click()
    page.settled("Send")
    assert page.sent[3]["messages"] == [{"role": "user", "content": "Zero"}]
    assert [role for role, _ in contents(page)] == ["user", "assistant"]
    page.button("New chat").click()
    assert contents(page) == []
    assert page.page.locator("#chat li").count() == 0


def test_enter_sends_an_edited_message_and_its_hint_says_so(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    say(page, "One")
    hints = page.page.locator("#chat .keys:visible")
    expect(hints).to_have_text("Enter sends, Shift Enter begins a line, Esc stops")
    edit = page.page.locator("#chat").get_by_role("button", name="Edit", exact=True)
    edit.click()
    expect(hints).to_have_text("Enter sends, Shift Enter begins a line, Esc cancels")
    page.field("Edited message").fill(" ")
    page.page.keyboard.press("Enter")  # nothing to send
    expect(page.field("Edited message")).to_have_value(" ")
    page.page.keyboard.press("Escape")
    expect(hints).to_have_text("Enter sends, Shift Enter begins a line, Esc stops")
    edit.click()
    page.page.keyboard.press("End")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("Two")
    assert len(page.sent) == 1
    page.page.keyboard.press("Enter")
    page.settled("Send")
    assert page.sent[1]["messages"] == [{"role": "user", "content": "One\nTwo"}]


def test_stopping_an_answer(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=100_000)
    page.field("Message").fill("Hello")
    page.button("Send").click()
    page.page.locator(".assistant .token").nth(10).wait_for()
    page.button("Stop").click()
    page.settled("Send")
    [_, [_, answer]] = contents(page)
    assert answer
    assert page.error.count() == 0


def test_an_answer_ends_before_its_stop_string(tab, api):
    entries = [
        {"token": text, "bytes": list(text.encode()), "logprob": -1, "top_logprobs": []}
        for text in ("Hi", "#", "#")
    ]
    page = tab(model=api.chat, tab="chat")
    page.reply(
        {
            "choices": [
                {"delta": {"role": "assistant", "content": "Hi"}, "logprobs": {"content": entries}}
            ]
        },
        {"choices": [{"delta": {}, "logprobs": None, "finish_reason": "stop"}]},
        "[DONE]",
    )
    say(page, "Hello")
    assert contents(page)[1] == ["assistant", "Hi"]
    assert page.page.locator(".assistant .token").all_inner_texts() == ["Hi"]


def test_a_model_without_a_template_cannot_chat(tab, api):
    page = tab(tab="chat")
    chat = page.page.get_by_role("tab", name="Chat")
    expect(chat).to_have_attribute("aria-disabled", "true")
    chat.click(force=True)  # a locator waits for a tab that is enabled
    assert page.page.locator("#write").is_visible()
    assert f"which {api.plain} lacks" in page.page.locator("#no-chat").inner_text()
    page.field("Model").select_option(api.chat)
    assert page.page.locator("#no-chat").is_hidden()
    page.page.get_by_role("tab", name="Write").focus()
    page.page.keyboard.press("ArrowRight")
    expect(page.page.get_by_role("tab", name="Chat")).to_be_focused()
    assert page.page.locator("#chat").is_visible()
    page.field("Model").select_option(api.plain)
    assert page.page.locator("#write").is_visible()


def test_two_models_write_side_by_side(tab, api):
    page = tab(prompt="Once", max_tokens=8, seed=5)
    page.field("Compare").check()
    page.field("with").select_option(api.chat)
    page.proceed()
    first, second = sorted(page.sent, key=lambda body: body["model"] != api.plain)
    assert (first["model"], second["model"]) == (api.plain, api.chat)
    assert first | {"model": None} == second | {"model": None}
    for draft in page.page.locator("#drafts .pane").all():
        assert draft.is_visible()
        assert 1 <= draft.locator(".token").count() <= 8
    assert page.page.locator("#drafts .pane-name").all_inner_texts() == [api.plain, api.chat]
    page.page.locator("#drafts .pane").nth(1).get_by_role("button", name="Edit").click()
    expect(page.field("Text")).to_be_focused()
    page.field("Compare").uncheck()
    page.proceed()
    assert len(page.sent) == 3


def test_comparing_begins_with_another_model(tab, api):
    page = tab()
    for model, other in ((api.chat, api.plain), (api.plain, api.chat)):
        page.field("Compare").uncheck()
        page.field("Model").select_option(model)
        page.field("Compare").check()
        expect(page.field("with")).to_have_value(other)
    page.field("with").select_option(api.plain)  # the same twice, if one wants it
    expect(page.page.locator("#drafts .pane-name")).to_have_text([api.plain] * 2)


def test_two_models_chat_side_by_side(tab, api):
    page = tab(model=api.chat, tab="chat", compare=api.chat, max_tokens=5)
    say(page, "Hello")
    assert [body["model"] for body in page.sent] == [api.chat] * 2
    for at in (0, 1):
        assert [role for role, _ in contents(page, at)] == ["user", "assistant"]
    page.button("Regenerate").nth(1).click()
    page.settled("Send")
    assert len(page.sent) == 3
    page.field("with").select_option(api.plain)
    assert page.page.locator("#write").is_visible()


def test_another_model_gets_the_text_and_no_ids(tab, api):
    page = tab(prompt="Once", max_tokens=4).proceed()
    whole = page.editable_text()
    page.field("Model").select_option(api.chat)
    assert page.field("Text").input_value() == whole
    page.proceed()
    assert (page.sent[1]["model"], page.sent[1]["prompt"]) == (api.chat, whole)


def test_a_link_holds_model_text_and_settings(tab, api):
    page = tab(
        model=api.chat,
        prompt="Two\nlines & <b>",
        system="s",
        max_tokens=5,
        stop="a\nb",
        top_k=3,
        compare=api.plain,
    )
    page.field("Temperature").fill("1.2")
    page.button("Copy link").click()
    expect(page.button("Copied")).to_be_visible()
    link = page.page.evaluate("navigator.clipboard.readText()")
    assert link == page.page.url
    other = tab()
    other.page.goto(link)
    expect(other.field("Text")).to_have_value("Two\nlines & <b>")
    assert other.page.evaluate("String(linkParameters())") == page.page.evaluate(
        "String(linkParameters())"
    )
    values = {
        "Model": api.chat,
        "with": api.plain,
        "Max tokens": "5",
        "Stop strings": "a\nb",
        "Top-k": "3",
        "Temperature": "1.2",
    }
    assert {name: other.field(name).input_value() for name in values} == values
    other.open(model="lost")
    assert "lost" in other.page.locator("#page-error").inner_text()


def test_looking_inside(tab, api):
    page = tab(prompt="Once upon a time", max_tokens=6).proceed()
    with page.page.expect_popup() as opened:
        page.button("Look inside").click()
    report = opened.value
    report.wait_for_url(re.compile("^blob:"))
    report.locator("h1").wait_for()
    ids = page.page.evaluate("write.drafts[0].ids")
    assert page.sent[-1] == {"model": api.plain, "token_ids": ids}
    expect(page.button("Look inside")).to_be_enabled()
    page.button("Edit").click()
    page.field("Text").fill("The end")
    with page.page.expect_popup() as opened:
        page.button("Look inside").click()
    opened.value.wait_for_url(re.compile("^blob:"))
    assert page.sent[-1] == {"model": api.plain, "text": "The end"}


def test_looking_inside_a_text_that_is_too_long(tab):
    page = tab(prompt="TOO LONG " * 20_000, failures=1)
    with page.page.expect_popup() as opened:
        page.button("Look inside").click()
    expect(page.error).to_have_text(re.compile("the prompt has .* token"))
    if not opened.value.is_closed():
        opened.value.wait_for_event("close")


def test_errors_are_shown_in_words(tab, api):
    page = tab(prompt="Once", failures=3)
    page.reply({"error": {"message": "temperature must be at least 0"}}, status=400)
    page.proceed()
    assert page.error.inner_text() == "temperature must be at least 0"
    page.reply({"detail": "bad gateway"}, status=502)
    page.proceed()
    assert page.error.inner_text() == "The server answered with status 502."
    page.replies.append(None)
    page.proceed()
    assert "connection to the server was lost" in page.error.inner_text()
    page.reply(
        chunk([1, 2], prompt_token_ids=[0]), {"error": {"message": "the logits are not finite"}}
    )
    page.proceed()
    assert page.error.inner_text() == "the logits are not finite"
    assert page.tokens.count() == 2
    page.reply(chunk([1, 2]))  # and no [DONE]
    page.proceed()
    assert "connection to the server was lost" in page.error.inner_text()
    assert page.tokens.count() == 4
    page.proceed()
    assert page.error.count() == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_busy_server_is_asked_once_more(tab, times):
    page = tab(prompt="Once", max_tokens=4, failures=times)
    page.page.clock.install()
    busy = {
        "status": 429,
        "headers": {"Retry-After": "7"},
        "body": '{"error": {"message": "the queue is full"}}',
    }
    page.replies += [busy] * times
    page.button("Continue").click()
    expect(page.error).to_have_text(re.compile("in 7 s"))
    page.page.clock.run_for(7100)
    if times == 1:
        expect(page.error).to_have_count(0)
        expect(page.tokens).not_to_have_count(0)
        page.page.clock.resume()
    else:
        expect(page.error).to_have_text("the queue is full")
    page.settled()
    assert len(page.sent) == 2


def test_a_key_that_is_asked_for_later_costs_no_text(tab):
    page = tab(prompt="Once", max_tokens=3, failures=1).proceed()
    page.reply({"error": {"message": "the API key is missing or wrong"}}, status=401)
    page.proceed()
    assert page.error.inner_text() == "the API key is missing or wrong"
    page.page.get_by_label("API key").fill("sesame")
    page.button("Use key").click()
    expect(page.page.get_by_label("API key")).to_be_hidden()
    with page.page.expect_request("**/v1/completions") as asked:
        page.proceed()
    assert asked.value.headers["authorization"] == "Bearer sesame"
    assert page.tokens.count() == 6


def test_a_server_with_a_key(tab, served_run, start_server):
    guarded = start_server(served_run, "--api-key", "sesame")
    page = tab(failures=2, url=guarded.url)
    expect(page.page.get_by_label("API key")).to_be_focused()
    assert page.error.count() == 0  # nobody has done anything wrong yet
    page.page.keyboard.type("wrong")
    page.page.keyboard.press("Enter")
    expect(page.error).to_have_text(re.compile("the API key is missing or wrong"))
    page.page.get_by_label("API key").fill("sesame")
    page.button("Use key").click()
    expect(page.page.get_by_label("API key")).to_be_hidden()
    expect(page.page.locator("#page-error")).to_be_hidden()
    page.page.reload()
    page.page.locator("#model option").first.wait_for(state="attached")
    assert page.page.get_by_label("API key").is_hidden()
    page.field("Text").fill("Line")
    page.field("Max tokens").fill("4")
    page.proceed()
    expect(page.tokens).not_to_have_count(0)
