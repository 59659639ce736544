"""What the tests of the playground share: a server, tabs that complain about nothing, and what can
be read off them."""

import json
import math
import urllib.request
from urllib.parse import urlencode

import chromium
import pytest

browser = chromium.browser
FLOORS = (0.9, 0.6, 0.3, 0.1, 0.03, 0.01, 0.0)  # the least probability of each color
DEFAULTS = {
    "temperature": 0.8,
    "top_p": 1,
    "min_p": 0,
    "top_k": None,
    "repetition_penalty": 1,
    "presence_penalty": 0,
}
DEFAULTS |= {
    "frequency_penalty": 0,
    "seed": None,
    "stream": True,
    "stream_options": {"include_usage": True},
}
WRITTEN = DEFAULTS | {
    "max_tokens": 200,
    "logprobs": 5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


class Api:
    """The API, without the page."""

    def __init__(self, url):
        self.url = url
        models = self.get("/v1/models")["data"]
        self.ids = [model["id"] for model in models]
        self.plain = next(model["id"] for model in models if not model["chat"])
        self.chat = next(model["id"] for model in models if model["chat"])
        eos = {
            token
            for model in self.ids
            for token in self.get(f"/vocabulary?model={model}")["eos_ids"]
        }
        self.endless = {"logit_bias": {str(token): -100 for token in eos}}

    def get(self, path, body=None):
        data, headers = (
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, headers)
        ) as response:
            return json.load(response)

    def vocabulary(self, model):
        """The bytes of each id, b"" for special tokens."""
        found = self.get(f"/vocabulary?model={model}")
        raw = {int(token): bytes(values) for token, values in found["bytes"].items()}
        return [
            raw.get(token, b"") if text is None else text.encode()
            for token, text in enumerate(found["tokens"])
        ]


@pytest.fixture(scope="module")
def api(server):
    return Api(server.url)


class Tab:
    """The page in a tab, the requests it has sent, and what the browser complained about."""

    def __init__(self, page, api, url, failures):
        self.page, self.api, self.url, self.failures = page, api, url, failures
        self.sent, self.faults, self.asked = [], [], []
        self.replies = []  # to the next completions; None breaks the connection
        context = page.context  # with the tabs that the page opens
        context.route("**/v1/**completions", self._answer)
        context.on("request", self._record)
        context.on("console", lambda message: self.faults.append(message.text))
        context.on("weberror", lambda error: self.faults.append(str(error.error)))

    def _record(self, request):
        self.asked.append(request.url)
        if request.method == "POST":
            self.sent.append(request.post_data_json)

    def open(self, **parameters):
        self.page.goto(f"{self.url}/#{urlencode({'model': self.api.plain} | parameters)}")
        return self.ready()

    def ready(self):
        """Wait until the page has the models, or says why not."""
        signs = "#model option, #page-error:visible, #key-form:visible"
        self.page.locator(signs).first.wait_for(state="attached")
        return self

    def reload(self):
        self.page.reload()
        return self.ready()

    def button(self, name, exact=True):
        return self.page.get_by_role("button", name=name, exact=exact)

    def field(self, name):
        return self.page.get_by_label(name, exact=True)

    @property
    def tokens(self):
        return self.page.locator("#drafts .pane:visible .token")

    @property
    def paper(self):
        return self.page.locator("#drafts .body").first

    @property
    def error(self):
        return self.page.locator(".error:visible")

    def settled(self, button="Continue"):
        """Wait until nothing is written."""
        self.button(button).wait_for()
        return self

    def proceed(self):
        """Continue the text, and wait until that is done."""
        count = len(self.sent)
        self.button("Continue").click()
        self.settled()
        assert len(self.sent) > count
        return self

    def text(self):
        return self.page.evaluate("write.drafts[0].text")

    def editable_text(self):
        """The text as a text area holds it: HTML allows no carriage return there."""
        return self.text().replace("\r\n", "\n").replace("\r", "\n")

    def state(self):
        """Ids, probabilities and colors of the tokens that are shown."""
        return self.page.evaluate(
            """write.drafts[0].view.tokens.map(({id, logprob}, at) =>
                [id, logprob, Number(write.drafts[0].view.spans[at].className.match(/p(\\d)/)[1])])"""
        )

    def reply(self, *chunks, status=200, headers=None):
        """Answer the next completion with these chunks, as a server that breaks off or fails
        would."""
        body = "".join(
            f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n"
            for chunk in chunks
        )
        if status != 200:
            body = json.dumps(chunks[0])
        self.replies.append({"status": status, "headers": headers or {}, "body": body})

    def _answer(self, route):
        """Answer as a test wants it; otherwise ask the server, for a text that cannot end by
        itself: tests count."""
        if not self.replies:
            route.continue_(post_data=route.request.post_data_json | self.api.endless)
        elif (reply := self.replies.pop(0)) is None:
            route.abort()
        else:
            route.fulfill(**reply)


def chunk(ids, logprob=-0.1, **choice):
    """A chunk of /v1/completions with these tokens."""
    logprobs = {
        "token_logprobs": [logprob] * len(ids),
        "top_logprobs": [{f"token_id:{i}": logprob} for i in ids],
    }
    return {
        "choices": [
            {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": None}
            | choice
        ]
    }


def color(logprob):
    return next(at for at, floor in enumerate(FLOORS) if math.exp(logprob) >= floor)


@pytest.fixture
def tab(browser, api):
    """Opens tabs. Afterwards they must have asked the server alone, and have nothing to complain
    of.

    failures: how many requests fail because the test wants them to.
    """
    contexts, tabs = [], []

    def new_tab(width=1320, scheme="light", failures=0, url=api.url, **parameters):
        context = browser.new_context(
            viewport={"width": width, "height": 860},
            color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(10_000)
        contexts.append(context)
        tabs.append(Tab(context.new_page(), api, url, failures))
        return tabs[-1].open(**parameters)

    yield new_tab
    for context in contexts:
        context.close()
    for tab in tabs:
        failures = [text for text in tab.faults if text.startswith("Failed to load resource")]
        assert len(failures) == tab.failures
        complaints = sorted(set(tab.faults) - set(failures))
        assert complaints == [], complaints
        assert all(
            url.startswith((f"{tab.url}/", "data:", f"blob:{tab.url}/")) for url in tab.asked
        )
