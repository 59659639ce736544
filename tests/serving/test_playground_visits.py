"""The playground as a visitor finds it: first view, example, Enter, reloads, links, old errors."""

import json
import re

import playground_fixtures
import pytest
from playground_fixtures import chunk
from playwright.sync_api import expect

from thinker.serving.playground import example_prompt

browser, api, tab = (
    playground_fixtures.browser,
    playground_fixtures.api,
    playground_fixtures.tab,
)  # fixtures
PAIRS = "chat.conversations[0].asPairs"
TOKENS = (
    "write.drafts[0].view.tokens.map(({id, logprob, alternatives}) => [id, logprob, alternatives])"
)


def send(page, text, n_requests=1):
    """Send a message with Enter, and wait for the whole answer."""
    count = len(page.sent)
    page.field("Message").fill(text)
    page.page.keyboard.press("Enter")
    page.settled("Send")
    assert len(page.sent) == count + n_requests


def spoken(text, *special):
    """The chunk of a chat with one token per character, and then special tokens."""
    tokens = [{"token": one, "bytes": list(one.encode())} for one in text]
    tokens += [{"token": name, "bytes": None} for name in special]
    content = [token | {"logprob": -0.1, "top_logprobs": []} for token in tokens]
    choice = {"delta": {"content": text}, "logprobs": {"content": content}}
    return {"choices": [choice]}


# ---- first view ----------------------------------------------------------------------------------


def test_the_first_view_has_no_error_and_the_text_has_the_focus(tab):
    page = tab()
    page.page.goto(page.url)
    page.ready()
    expect(page.field("Text")).to_be_focused()
    assert page.error.count() == 0
    assert page.page.locator("[aria-invalid='true']").count() == 0


def test_a_server_that_generates_few_tokens_is_asked_for_as_many(tab, served_run, start_server):
    limited = start_server(served_run, "--max-tokens", 7)
    page = tab(url=limited.url, prompt="Once")
    expect(page.field("Max tokens")).to_have_value("7")
    page.proceed()
    assert page.sent[0]["max_tokens"] == 7
    assert page.error.count() == 0
    page.field("Max tokens").fill("8")
    page.button("Continue").click()
    expect(page.field("Max tokens")).to_be_focused()
    assert len(page.sent) == 1
    page.button("Reset").click()
    expect(page.field("Max tokens")).to_have_value("7")


def test_enter_works_at_once_after_a_reload_of_a_text(tab):
    page = tab(prompt="Once", max_tokens=4).proceed()
    page.reload()
    expect(page.paper).to_be_focused()
    page.page.keyboard.press("Enter")
    expect(page.tokens).to_have_count(8)
    page.settled()
    page.button("Edit").click()
    page.reload()
    expect(page.field("Text")).to_be_focused()


def test_the_message_has_the_focus_in_a_chat_that_opens(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    expect(page.field("Message")).to_be_focused()
    send(page, "Hello")
    page.reload()
    expect(page.field("Message")).to_be_focused()
    assert page.page.evaluate("scrollY") == 0


def test_a_page_that_loads_takes_no_focus_from_the_user(tab, api):
    page = tab(prompt="Once")
    held = []
    page.page.route("**/v1/models", lambda route: held.append(route))
    with page.page.expect_request("**/v1/models"):
        page.page.reload(wait_until="commit")
    page.button("Theme: auto").focus()
    held[0].continue_()
    page.ready()
    expect(page.field("Text")).to_have_value("Once")
    page.page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.button("Theme: auto")).to_be_focused()


# ---- an example ----------------------------------------------------------------------------------


def write_run(folder, sample_prompt):
    folder.mkdir()
    content = json.dumps({"train": {"sample_prompt": sample_prompt}})
    (folder / "config.yaml").write_text(content)
    return folder


def test_the_example_is_the_prompt_of_the_samples_of_the_run(tmp_path):
    run = write_run(tmp_path / "run", "def ")
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    assert example_prompt(run) == example_prompt(checkpoint) == "def "
    assert example_prompt(write_run(tmp_path / "silent", "")) is None
    assert example_prompt(tmp_path) is None  # no run


def test_one_click_fills_in_the_example_of_the_run(tab):
    page = tab()
    page.page.evaluate("$('model').value && (write.drafts[0].model.example = 'Once upon a time')")
    page.page.evaluate("refresh()")
    page.button("Try “Once upon a time”").click()
    expect(page.field("Text")).to_have_value("Once upon a time")
    expect(page.field("Text")).to_be_focused()
    expect(page.page.locator("#example")).to_be_hidden()
    page.field("Text").fill("")
    expect(page.page.locator("#example")).to_be_visible()


def test_a_model_without_an_example_writes_one_itself(tab, api):
    page = tab()
    assert api.get("/v1/models")["data"][0]["example"] is None
    page.button("Try an example").click()
    expect(page.field("Text")).not_to_have_value("")
    [asked] = page.sent
    assert (asked["prompt"], asked["model"]) == ("", api.plain)
    page.field("Max tokens").fill("4")
    page.field("Text").focus()
    page.page.keyboard.press("Enter")
    expect(page.tokens).to_have_count(4)


def test_one_click_fills_in_the_first_message_of_a_chat(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    page.button("Try “Hello!”").click()
    expect(page.field("Message")).to_be_focused()
    page.page.keyboard.press("Enter")
    page.settled("Send")
    assert page.sent[0]["messages"] == [{"role": "user", "content": "Hello!"}]
    expect(page.page.locator("#chat-example")).to_be_hidden()


# ---- Enter in a text -----------------------------------------------------------------------------


def test_enter_continues_a_text_and_shift_enter_begins_a_line(tab):
    page = tab(max_tokens=4, seed=1)
    page.field("Text").focus()
    page.page.keyboard.type("One")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("Two")
    assert page.sent == []
    page.page.keyboard.press("Enter")
    expect(page.tokens).to_have_count(4)
    page.settled()
    assert page.sent[0]["prompt"] == "One\nTwo"
    expect(page.paper).to_be_focused()
    page.page.keyboard.press("Enter")  # again, from the end
    expect(page.tokens).to_have_count(8)


def test_enter_of_an_input_method_is_not_sent(tab, api):
    page = tab(model=api.chat, tab="chat", prompt="Once")
    for selector in ("#prompt", "#message"):
        page.page.evaluate(
            """selector => document.querySelector(selector).dispatchEvent(new KeyboardEvent(
                "keydown", {key: "Enter", isComposing: true, bubbles: true}))""",
            selector,
        )
    assert page.sent == []


# ---- reload --------------------------------------------------------------------------------------


def test_a_reload_keeps_the_text_its_tokens_and_settings(tab):
    page = tab(prompt="Once", max_tokens=6, seed=1).proceed()
    page.field("Temperature").fill("0.3")
    before, text = page.page.evaluate(TOKENS), page.text()
    assert len(before) == 6
    page.reload()
    expect(page.tokens).to_have_count(6)
    assert page.page.evaluate(TOKENS) == before
    assert page.text() == text
    expect(page.field("Temperature")).to_have_value("0.3")
    ids = page.page.evaluate("write.drafts[0].ids")
    page.proceed()
    assert page.sent[1]["prompt"] == ids
    page.button("Edit").click()
    page.field("Text").fill("not sent yet")
    page.reload()
    expect(page.field("Text")).to_have_value("not sent yet")


def test_tokens_that_the_model_no_longer_has_are_kept_as_text(tab):
    page = tab(prompt="Once", max_tokens=3)
    page.reply(chunk([70, 71, 72], prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    text = page.editable_text()

    def other_words(route):
        content = route.fetch().json()
        content["tokens"][71] = "another word"
        route.fulfill(json=content)

    page.page.route("**/vocabulary*", other_words)
    with page.page.expect_response("**/vocabulary*"):
        page.reload()
    expect(page.field("Text")).to_have_value(text)
    page.proceed()
    assert page.sent[1]["prompt"] == text


def test_a_reload_keeps_the_chat(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=6, system="Be kind.")
    for text in ("One", "Two\nlines"):
        send(page, text)
    page.field("Message").fill("half a thought")
    pairs = page.page.evaluate(PAIRS)
    shown = page.page.locator("#chat .token").all_inner_texts()
    page.reload()
    expect(page.field("Message")).to_have_value("half a thought")
    assert page.page.evaluate(PAIRS) == pairs
    assert page.page.locator("#chat .token").all_inner_texts() == shown
    send(page, "Three")
    said = [{"role": role, "content": content} for role, content in pairs]
    system, last = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Three"}
    assert page.sent[-1]["messages"] == [system, *said, last]


def test_another_link_wins_over_what_a_reload_would_keep(tab, api):
    page = tab(prompt="One")
    page.field("Text").fill("Two")
    page.page.goto("about:blank")
    page.open(prompt="Three")
    expect(page.field("Text")).to_have_value("Three")


def test_more_tokens_than_the_browser_keeps_are_kept_as_text(tab):
    page = tab(prompt="Once", max_tokens=3).proceed()
    text = page.editable_text()
    page.page.evaluate(
        """() => { const store = Storage.prototype.setItem;
            Storage.prototype.setItem = function (name, value) {
                if (value.length > 2000) throw new DOMException("full", "QuotaExceededError");
                store.call(this, name, value);
            }; }"""
    )
    page.reload()
    expect(page.field("Text")).to_have_value(text)


# ---- links ---------------------------------------------------------------------------------------


def test_a_link_carries_the_conversations(tab, api):
    page = tab(model=api.chat, tab="chat", compare=api.chat, max_tokens=6)
    page.field("Message").fill("Hi & <b>é🙂\nthere")
    page.page.keyboard.press("Enter")
    page.settled("Send")
    both = "chat.conversations.map(({asPairs}) => asPairs)"
    pairs = page.page.evaluate(both)
    assert [len(one) for one in pairs] == [2, 2]
    page.button("Copy link").click()
    link = page.page.evaluate("navigator.clipboard.readText()")
    other = tab()
    other.page.goto("about:blank")
    other.page.goto(link)
    other.ready()
    assert other.page.evaluate(both) == pairs
    assert other.page.locator("#chat").is_visible()
    assert other.page.locator("#chat b").count() == 0
    send_both = other.page.locator("#chat .assistant .message-text").all_inner_texts()
    assert len(send_both) == 2


@pytest.mark.parametrize("damaged", ["[[", "7", '[["system", "x"]]', '[["user", 5]]', "[null]"])
def test_a_damaged_conversation_in_a_link_is_an_error(tab, api, damaged):
    page = tab(model=api.chat, tab="chat", chat=damaged)
    expect(page.error).to_have_text(re.compile("conversation in this link is damaged"))
    assert page.page.evaluate(PAIRS) == []


# ---- special tokens ------------------------------------------------------------------------------


def marks(page):
    """What the style sheet shows in addition to the text."""
    return page.page.locator(".token").evaluate_all(
        "all => all.map(one => one.dataset.mark ?? '').filter(Boolean)"
    )


def test_answers_of_a_chat_show_no_special_tokens(tab, api):
    page = tab(model=api.chat, tab="chat")
    vocabulary = api.get(f"/vocabulary?model={api.chat}")
    end = vocabulary["special"][str(vocabulary["eos_ids"][0])]
    page.reply(spoken("Hi", end, "<|im_start|>"), "[DONE]")
    send(page, "Hello")
    assert page.page.evaluate(PAIRS) == [["user", "Hello"], ["assistant", "Hi"]]
    assert page.page.locator(".assistant .token").all_inner_texts() == ["H", "i"]
    assert marks(page) == []
    assert "<|" not in page.page.locator("#chat").inner_text()


def test_a_special_token_of_a_text_is_a_mark_and_not_its_name(tab, api):
    vocabulary = api.get(f"/vocabulary?model={api.plain}")
    end = vocabulary["eos_ids"][0]
    page = tab(prompt="Once")
    page.reply(chunk([70, end], prompt_token_ids=[0]), "[DONE]")
    page.proceed()
    assert marks(page) == ["end of text"]
    assert "<|" not in page.text()
    assert page.page.evaluate("markOf({name: '<|user|>'})") == "◇"


# ---- errors that go ------------------------------------------------------------------------------


def fail(page, message="temperature is too high"):
    page.reply({"error": {"message": message}}, status=400)
    page.proceed()
    assert page.error.all_inner_texts() == [message]


def test_an_error_goes_when_a_setting_the_text_or_the_model_changes(tab, api):
    page = tab(prompt="Once", failures=4)
    fail(page)
    page.field("Temperature").fill("0.5")
    expect(page.error).to_have_count(0)
    fail(page)
    page.field("Text").click()
    assert page.error.count() == 1  # still true, and to be read while one edits
    page.page.keyboard.type("x")
    expect(page.error).to_have_count(0)
    fail(page)
    page.button("Clear").click()
    expect(page.error).to_have_count(0)
    page.button("Undo").click()
    fail(page)
    page.field("Model").select_option(api.chat)
    expect(page.error).to_have_count(0)


def test_a_text_to_which_nothing_was_added_stays_editable(tab):
    page = tab(prompt="Once", max_tokens=4, failures=3)
    page.replies.append(None)
    page.field("Text").focus()
    page.page.keyboard.press("Enter")
    expect(page.error).to_have_count(1)
    expect(page.field("Text")).to_be_focused()
    page.page.keyboard.type(" more")
    expect(page.error).to_have_count(0)
    fail(page)
    page.proceed()
    assert page.sent[-1]["prompt"] == "Once more"
    expect(page.tokens).to_have_count(4)
    page.reply({"error": {"message": "the queue is full"}}, status=400)
    page.button("Regenerate").click()
    page.settled()
    expect(page.field("Text")).to_have_value("Once more")
    page.button("Undo").click()
    expect(page.tokens).to_have_count(4)


def test_an_error_of_a_chat_goes_with_the_next_input(tab, api):
    page = tab(model=api.chat, tab="chat", failures=1)
    page.reply({"error": {"message": "too long"}}, status=400)
    send(page, "Hello")
    expect(page.error).to_have_text("too long")
    page.field("Message").fill("Hi")
    expect(page.error).to_have_count(0)


def test_the_error_of_a_link_goes_when_a_model_is_chosen(tab, api):
    page = tab(model="lost")
    expect(page.error).to_have_text("This server does not have the model lost.")
    page.field("Model").select_option(api.chat)
    expect(page.error).to_have_count(0)


def test_a_setting_that_is_corrected_is_no_longer_red(tab):
    page = tab(prompt="Once")
    page.field("Temperature").fill("-1")
    page.button("Continue").click()
    expect(page.field("Temperature")).to_have_attribute("aria-invalid", "true")
    page.field("Temperature").fill("1")
    expect(page.field("Temperature")).to_have_attribute("aria-invalid", "false")


# ---- speed ---------------------------------------------------------------------------------------


def test_the_speed_is_that_of_the_tokens_after_the_first(tab):
    page = tab()
    page.page.clock.install(time=0)
    page.page.clock.pause_at(10_000)
    page.page.evaluate("window.speed = new Speed(write.drafts[0], null)")
    page.page.evaluate("speed.started = performance.now()")
    said = []
    # A first event with three tokens, then four and five, each a second after the last.
    for milliseconds, count in ((250, 3), (1000, 4), (1000, 5)):
        page.page.clock.run_for(milliseconds)
        page.page.evaluate("count => speed.add(count)", count)
        said.append(page.page.evaluate("speed.text()"))
    page.page.clock.run_for(60_000)  # until the stream is closed: no token came in this time
    said.append(page.page.evaluate("speed.text()"))
    assert said[0].startswith("first after 250 ms")
    assert "tokens/s" not in said[0]
    assert "then 4.0 tokens/s" in said[1]
    assert "then 4.5 tokens/s" in said[2]
    assert said[3] == said[2]


def test_bursts_that_arrive_together_have_no_speed(tab):
    page = tab(prompt="Once")
    burst = [chunk([70], prompt_token_ids=[0])] * 40
    page.reply(*burst, "[DONE]")
    page.proceed()
    stats = page.page.locator(".stats").first
    expect(stats).to_contain_text("first after")
    expect(stats).not_to_contain_text("tokens/s")
    page.reply(*burst, {"choices": [], "timings": {"predicted_per_second": 612.3}}, "[DONE]")
    page.proceed()
    expect(stats).to_contain_text("then 612 tokens/s")


def test_a_time_that_is_too_short_has_no_speed(tab):
    page = tab()
    page.page.clock.install(time=0)
    page.page.clock.pause_at(10_000)
    page.page.evaluate("window.speed = new Speed(write.drafts[0], null)")
    said = []
    # The first burst is read in 8 ms: its 50 tokens took no time after the first.
    for milliseconds, count in ((250, 20), (8, 30), (30, 100), (969, 190), (1, 10), (1000, 300)):
        page.page.clock.run_for(milliseconds)
        page.page.evaluate("count => speed.add(count)", count)
        said.append(page.page.evaluate("speed.perSecond"))
    assert said[:4] == [None] * 4
    assert said[4:] == pytest.approx([300, 300])


def test_the_speed_agrees_with_what_the_server_measures(tab, api, server):
    def measured():
        name = "thinker_seconds_per_token"
        parts = [server.metric(f"{name}_{part}", model=api.plain) for part in ("sum", "count")]
        return [part or 0 for part in parts]

    total, count = measured()
    page = tab(prompt="Once", max_tokens=1500, seed=1, logprobs=0).proceed()
    new_total, new_count = measured()
    assert new_count == count + 1
    stats = page.page.locator(".stats").first.inner_text()
    shown = float(re.search(r"then ([\d.]+) tokens/s", stats)[1])
    assert shown == pytest.approx(1 / (new_total - total), rel=0.25)


def test_a_request_that_fails_leaves_no_trace(tab):
    """Neither a step to undo nor a beginning for Regenerate, and its end is not said twice."""
    page = tab(prompt="Once", max_tokens=4, failures=2)
    page.proceed()
    fail(page)
    assert "an error ended it" not in page.page.locator(".stats").first.inner_text()
    page.field("Temperature").fill("0.5")
    page.button("Regenerate").click()
    page.settled()
    expect(page.tokens).to_have_count(4)
    page.button("Undo").click()  # Regenerate
    page.button("Undo").click()  # Continue
    expect(page.field("Text")).to_have_value("Once")
    expect(page.button("Undo")).to_be_disabled()
    fail(page)
    expect(page.field("Text")).to_have_value("Once")
    expect(page.button("Undo")).to_be_disabled()


def distance_from_end(page, selector):
    return page.page.locator(selector).first.evaluate(
        "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    )


def test_a_reload_shows_the_end_of_a_long_text_where_new_text_appears(tab):
    page = tab(prompt="a\n" * 45, max_tokens=4).proceed()
    page.reload()
    expect(page.tokens).to_have_count(4)
    assert distance_from_end(page, "#drafts .body") < 60
    page.paper.evaluate("box => (box.scrollTop = 0)")
    page.proceed()
    assert distance_from_end(page, "#drafts .body") < 60


def test_a_reload_shows_the_end_of_a_long_chat(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    send(page, "a\n" * 45)
    page.reload()
    expect(page.page.locator("#chat .token").first).to_be_visible()
    assert distance_from_end(page, "#conversations .body") < 60


def test_an_edited_text_that_is_too_long_goes_on(tab):
    """The model sees its end, as if it had written the text itself."""
    page = tab(prompt="Once upon a time. " * 200, max_tokens=4, failures=1)
    limit = page.page.evaluate("write.drafts[0].model.context_length")
    page.proceed()
    expect(page.tokens).to_have_count(4)
    assert page.error.count() == 0
    assert page.sent[-1]["truncate_prompt_tokens"] == limit
    assert page.page.evaluate("write.drafts[0].promptIds.length") == limit
    assert f"context {limit} of {limit} (sliding)" in page.page.locator(".stats").first.inner_text()


def test_looking_inside_a_text_that_has_ended_or_slid(tab, api):
    vocabulary = api.get(f"/vocabulary?model={api.plain}")
    end = vocabulary["eos_ids"][0]
    page = tab(prompt="Once")
    limit = page.page.evaluate("write.drafts[0].model.context_length")
    words = [number for number in range(limit + 20) if number % 50 + 5 != end]
    ids = [number % 50 + 5 for number in words]
    page.reply(chunk([*ids, end], prompt_token_ids=[1]), "[DONE]")
    page.proceed()
    with page.page.expect_popup() as opened:
        page.button("Look inside").click()
    opened.value.wait_for_url(re.compile("^blob:"))
    assert page.sent[-1]["token_ids"] == ids[-limit:]


def test_a_chat_that_is_too_long_forgets_its_oldest_turns(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4, failures=2)
    for text in ("one", "two", "three"):
        send(page, text)
    too_long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    page.reply(too_long, status=400)
    send(page, "four", n_requests=2)
    said = [message["content"] for message in page.sent[-1]["messages"]]
    assert said[0] == "three"
    assert said[-1] == "four"
    assert page.error.count() == 0
    stats = page.page.locator("#conversations .stats").first
    expect(stats).to_contain_text("the model no longer sees the first 4 messages")
    send(page, "five")  # which need not be refused before
    assert page.sent[-1]["messages"][0]["content"] == "three"
    assert page.page.evaluate(PAIRS)[0] == ["user", "one"]  # it is still shown
    page.button("New chat").click()
    page.reply(too_long, status=400)
    send(page, "a single message")
    expect(page.error).to_have_text("too long")
    assert page.page.evaluate(PAIRS) == []  # templates want an answer to each message
    assert page.field("Message").input_value() == "a single message"
    send(page, "a shorter one")
    assert [message["role"] for message in page.sent[-1]["messages"]] == ["user"]


def test_a_message_that_is_too_long_costs_no_earlier_turn(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4, failures=3)
    for text in ("one", "two", "three"):
        send(page, text)
    too_long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    for _ in range(3):
        page.reply(too_long, status=400)
    send(page, "a long one", n_requests=3)
    expect(page.error).to_have_text("too long")
    assert "no longer sees" not in page.page.locator("#conversations .stats").first.inner_text()
    send(page, "a short one")
    assert page.sent[-1]["messages"][0]["content"] == "one"


def test_an_answer_that_cannot_be_written_again_is_kept(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4, failures=1)
    for text in ("one", "two"):
        send(page, text)
    pairs = page.page.evaluate(PAIRS)
    page.reply({"error": {"message": "the queue is full"}}, status=400)
    page.button("Regenerate").first.click()
    expect(page.error).to_have_text("the queue is full")
    assert page.page.evaluate(PAIRS) == pairs
    expect(page.page.locator("#chat li.assistant")).to_have_count(2)


def test_the_edit_box_says_what_sending_replaces(tab, api):
    page = tab(model=api.chat, tab="chat", max_tokens=4)
    for text in ("one", "two"):
        send(page, text)
    page.button("Edit").first.click()
    expect(page.page.locator(".replaces")).to_have_text("; replaces the 3 messages after it")
