"""The other paths of the server, who may use them, and its command line."""

import argparse
import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from conftest import ROOT
from server_process import wait_until

from thinker.api.inspecting import inspect
from thinker.generation.mixed_bits import matrix_names
from thinker.interop import load
from thinker.serving import app, inspection
from thinker.serving.__main__ import allowed_hosts
from thinker.serving.protocol import InspectRequest
from thinker.serving.server_metrics import Metrics

KEY = {"Authorization": "Bearer KEY"}
SITE = {"Origin": "https://example.org"}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def guarded(served_run, start_server):
    """A client of a server with a key, whose API one web site may call."""
    server = start_server(served_run, "--api-key", "KEY", "--cors", SITE["Origin"])
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def refused(response, status, message):
    """Whether a response is an error in OpenAI's form with this message."""
    error = response.json()["error"]
    return (response.status_code, set(error)) == (
        status,
        {"message", "type", "param", "code"},
    ) and (message in error["message"])


def test_health(http):
    assert http.get("/health").json() == {"status": "ok"}


def test_the_playground(http):
    page = http.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<script src=" not in page.text


def test_bits_by_matrix(served_run, start_server, tmp_path):
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps({"bits": dict.fromkeys(matrix_names(2), 4) | {"lm_head": 8}}))
    server = start_server(f"mixed={served_run}", "--bits", f"mixed:{path}")
    assert "mixed: 4-bit weights, 1 of 9 matrices 8-bit, " in server.log
    body = {"model": "mixed", "prompt": "Line", "max_tokens": 4, "logit_bias": {"299": -1e9}}
    assert (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"][
            "completion_tokens"
        ]
        == 4
    )
    server.stop()


def test_models_are_counted_as_they_were_trained(served_run, start_server):
    model, _ = load(served_run)
    server = start_server(f"small={served_run}", "--bits", "8", "--no-slide", "--max-prompt", "50")
    (entry,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert entry["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert (entry["id"], entry["slides"], entry["max_prompt_tokens"]) == ("small", False, 50)
    assert re.fullmatch("8-bit weights, (fp32|bf16)", entry["precision"])
    body = {"model": "small", "prompt": [1] * 49, "max_tokens": 999, "logit_bias": {"299": -1e9}}
    got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert (got["choices"][0]["finish_reason"], got["usage"]["total_tokens"]) == ("length", 161)
    body["prompt"] = [1] * 50  # and the BOS token
    assert refused(
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60), 400, "reads at most 50"
    )


def test_a_cap_on_tokens_per_text(served_run, chat_run, start_server):
    server = start_server(served_run, chat_run, "--max-tokens", "7")
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http:
        assert [entry["max_tokens"] for entry in http.get("/models").json()["data"]] == [7, 7]
        body = {"model": "served", "prompt": "Line", "logit_bias": {"299": -1e9}}
        got = http.post("/completions", json=body | {"max_tokens": 7}).json()
        assert got["usage"]["completion_tokens"] == 7
        answer = http.post("/completions", json=body | {"max_tokens": 8})
        assert refused(answer, 400, "max_tokens is 8; this server generates at most 7 tokens")
        chat = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
        # By default, a chat asks for what fits.
        got = http.post("/chat/completions", json=chat).json()
        assert got["usage"]["completion_tokens"] <= 7
        for name in ("max_tokens", "max_completion_tokens"):
            answer = http.post("/chat/completions", json=chat | {name: 8})
            assert refused(answer, 400, f"{name} is 8; this server generates at most 7 tokens")
            assert answer.json()["error"]["param"] == name
    server.stop()


@pytest.mark.parametrize("n_tokens", [1, 120])
def test_the_last_chunk_says_how_fast_the_text_was(server, http, n_tokens):
    def seconds_per_token():
        return server.metric("thinker_seconds_per_token_sum", model="served") or 0

    before = seconds_per_token()
    body = {
        "model": "served",
        "prompt": "Line",
        "max_tokens": n_tokens,
        "logprobs": 1,  # so that a step adds one token
        "logit_bias": {"299": -1e9},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last, done, end = http.post("/v1/completions", json=body).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert not any("timings" in chunk for chunk in chunks)
    speed = json.loads(last.removeprefix("data: "))["timings"]["predicted_per_second"]
    if n_tokens == 1:
        assert speed is None
    else:
        assert 1 / speed == pytest.approx(seconds_per_token() - before)


def test_metrics_add_up(server, http):
    names = {
        "thinker_prompt_tokens_total": {"model": "served"},
        "thinker_cached_prompt_tokens_total": {"model": "served"},
        "thinker_generated_tokens_total": {"model": "served"},
        "thinker_texts_total": {"model": "served"},
        "thinker_text_seconds_count": {"model": "served"},
        "thinker_first_token_seconds_count": {"model": "served"},
        "thinker_requests_total": {"path": "/v1/completions"},
    }

    def read():
        return [server.metric(name, **labels) for name, labels in names.items()]

    before = read()
    usages = []
    for prompts, n in ([["metrics"], 1], [["metrics", "add up"], 3], ["a" * 20, 1]):
        body = {
            "model": "served",
            "prompt": prompts,
            "n": n,
            "max_tokens": 5,
            "logit_bias": {"299": -1e9},
        }
        usages.append(http.post("/v1/completions", json=body).json()["usage"])
    http.post(
        "/v1/completions", json={"model": "served"}
    )  # a mistake, which counts as a request only
    prompt, cached, new, *counts, n_requests = (after - old for after, old in zip(read(), before))
    n_texts = 1 + 2 * 3 + 1
    assert counts == [n_texts] * 3
    assert new == sum(usage["completion_tokens"] for usage in usages) == 5 * n_texts
    assert (
        prompt
        == usages[0]["prompt_tokens"] + 3 * usages[1]["prompt_tokens"] + usages[2]["prompt_tokens"]
    )
    assert 0 < cached < prompt
    assert n_requests == 4
    assert server.metric("thinker_running_texts") == server.metric("thinker_waiting_texts") == 0
    http.get("/unknown/path")
    assert not server.metric("thinker_requests_total", path="/unknown/path")
    assert server.metric("thinker_requests_total", path="other", status="404")


def test_the_vocabulary_gives_the_bytes_of_every_id(http, served_run):
    _, tokenizer = load(served_run)
    words = http.get("/vocabulary", params={"model": "served"}).json()
    assert (words["bos_id"], words["eos_ids"]) == (tokenizer.bos_id, tokenizer.eos_ids)
    assert len(words["tokens"]) == tokenizer.vocab_size
    for token, text in enumerate(words["tokens"]):
        data = bytes(words["bytes"].get(str(token), [])) if text is None else text.encode()
        assert data == tokenizer.token_bytes(token)
    assert refused(
        http.get("/vocabulary", params={"model": "other"}), 404, "there is no model 'other'"
    )
    assert refused(http.get("/vocabulary"), 404, "available: served, chat")


def test_inspect(http):
    page = http.post("/inspect", json={"model": "served", "text": "the cat sat"})
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    assert page.text.rstrip().endswith("</html>")
    assert (
        http.post("/inspect", json={"model": "served", "token_ids": [299, 97, 98]}).status_code
        == 200
    )


def test_inspect_opens_the_head_that_the_map_of_the_command_shows(http, served_run):
    model, tokenizer = load(served_run)
    for text in ("the cat sat", "Line 7", "once"):
        page = http.post("/inspect", json={"model": "served", "text": text}).text
        start = json.loads(re.search(r'id="facts">(.*?)</script>', page)[1])["start"]
        shown = inspect(model, tokenizer, "map", text).data
        assert (start["layer"], start["head"]) == (shown["layer"], shown["head"])


def test_inspect_opens_the_first_head_where_finding_another_takes_long(served_run, monkeypatch):
    served = SimpleNamespace(path=served_run, name="served")
    body = InspectRequest(model="served", text="the cat sat")
    monkeypatch.setattr(inspection, "MAX_CHOICE_FLOPS", 1.0)
    monkeypatch.setattr(inspection, "choose_head", None)
    page = inspection.inspection_page(served, body)
    start = json.loads(re.search(r'id="facts">(.*?)</script>', page)[1])["start"]
    assert (start["layer"], start["head"]) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({}, 400, "pass either text or token_ids"),
        ({"text": "a", "token_ids": [1, 2]}, 400, "pass either text or token_ids"),
        ({"text": "word " * 200}, 400, "160"),
        ({"token_ids": [1] * 161}, 400, "use 2 to 160 ids below 300"),
        ({"token_ids": [1]}, 400, "use 2 to 160 ids below 300"),
        ({"token_ids": [1, 300]}, 400, "use 2 to 160 ids below 300"),
        ({"token_ids": "ab"}, 400, "use a list of token ids"),
        ({"model": "other", "text": "a"}, 404, "there is no model 'other'"),
    ],
)
def test_mistakes_of_inspect(http, fields, status, message):
    assert refused(http.post("/inspect", json={"model": "served"} | fields), status, message)


def test_pages_of_other_sites_have_no_access(http):
    preflight = {**SITE, "Access-Control-Request-Method": "POST"}
    assert http.options("/v1/completions", headers=preflight).status_code == 405
    assert "Access-Control-Allow-Origin" not in http.get("/v1/models", headers=SITE).headers
    simple = {
        "content": '{"model": "served", "prompt": "a"}',
        "headers": {"Content-Type": "text/plain"},
    }
    assert refused(
        http.post("/v1/completions", **simple), 415, "send Content-Type: application/json"
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1/?", "[::1"]
)
def test_a_name_that_resolves_to_this_machine_gives_no_access(http, host):
    for path in ("/", "/health", "/v1/models"):
        response = http.get(path, headers={"Host": host})
        assert host == "[::1" or refused(response, 403, "this server does not answer to the name")
    for local in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8000"):
        assert http.get("/health", headers={"Host": local}).status_code == 200


def test_allowed_hosts(served_run, start_server):
    server = start_server(
        served_run, "--allowed-host", "Models.example.org", "--allowed-host", "[::2]"
    )
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for host in ("models.example.org", "MODELS.example.org:443", "[::2]:80", "localhost"):
            assert http.get("/health", headers={"Host": host}).status_code == 200
        answer = http.get("/health", headers={"Host": "example.org"})
        assert refused(answer, 403, "see --allowed-host")
    server.stop()


@pytest.mark.parametrize(
    ("host", "is_local", "allowed", "expected"),
    [
        ("127.0.0.1", True, [], {"localhost", "127.0.0.1", "::1"}),
        ("0.0.0.0", False, [], None),
        ("0.0.0.0", False, ["a.b"], {"a.b", "0.0.0.0", "localhost", "127.0.0.1", "::1"}),
    ],
)
def test_the_names_of_a_server(host, is_local, allowed, expected):
    arguments = argparse.Namespace(host=host, allowed_host=allowed)
    assert allowed_hosts(arguments, is_local) == expected


def test_no_other_site_can_frame_our_pages(http):
    policy = http.get("/").headers["Content-Security-Policy"]
    assert policy == "frame-ancestors 'none'"
    page = http.post("/inspect", json={"model": "served", "text": "Line"}, timeout=60)
    assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_a_key_and_a_web_site(guarded):
    paths = [
        *(route for route in ROUTES if route not in app.OPEN_PATHS),
        "/v1/models/served",
        "/other",
        "/health/",
    ]
    for path in paths:
        for headers in (
            {},
            {"Authorization": "Bearer key"},
            {"Authorization": "KEY"},
            {"Host": "127.0.0.1/health?"},
        ):
            response = guarded.get(path, headers=headers)
            assert response.status_code == (403 if "Host" in headers else 401), path
    assert app.OPEN_PATHS == ("/", "/health")
    assert [guarded.get(path).status_code for path in app.OPEN_PATHS] == [200, 200]
    assert [guarded.get(path, headers=KEY).status_code for path in ("/v1/models", "/metrics")] == [
        200,
        200,
    ]

    names = "authorization,content-type,x-stainless-os"  # of OpenAI's client for browsers
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    allowed = guarded.options("/v1/completions", headers=SITE | asked)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (
        200,
        SITE["Origin"],
    )
    assert names == allowed.headers["Access-Control-Allow-Headers"]
    assert (
        guarded.options(
            "/v1/completions", headers={"Origin": "https://evil.example"} | asked
        ).status_code
        == 400
    )
    for headers in (SITE, SITE | KEY):  # also errors can be read
        response = guarded.get("/v1/models", headers=headers)
        assert response.headers["Access-Control-Allow-Origin"] == SITE["Origin"]
    assert response.headers["Access-Control-Expose-Headers"] == "Retry-After"


ROUTES = (
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/vocabulary",
    "/inspect",
    "/v1/completions",
    "/v1/chat/completions",
)


def test_all_routes_are_tested():
    application = app.create_app(app.Service({}, Metrics(), ""), [])
    assert {route.path for route in application.routes} == {*ROUTES, "/v1/models/{name:path}"}


@pytest.mark.parametrize("path", ["/v1/completions", "/inspect"])
def test_a_client_that_leaves_while_it_sends(server, path):
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b'{"model"')
    wait_until(lambda: server.metric("thinker_requests_total", path=path, status="499"))
    assert "Traceback" not in server.log


async def call(service, path, messages, method="POST"):
    """The status and body of the application's response to these messages of ASGI; afterwards the
    client is silent."""
    sent, messages = [], list(messages)

    async def receive():
        return messages.pop(0) if messages else await asyncio.get_running_loop().create_future()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "query_string": b"",
    }
    await app.create_app(service, [])(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.01)
    start = {"type": "http.request", "body": b'{"model"', "more_body": True}
    status, body = asyncio.run(call(app.Service({}, Metrics(), ""), "/v1/completions", [start]))
    assert (status, json.loads(body)["error"]["type"]) == (408, "invalid_request_error")


def test_health_after_an_engine_has_failed():
    model = SimpleNamespace(engine=SimpleNamespace(is_alive=False))
    status, body = asyncio.run(call(app.Service({"a": model}, Metrics(), ""), "/health", [], "GET"))
    assert (status, json.loads(body)) == (503, {"status": "failed"})


def test_nothing_is_inspected_for_a_client_that_has_left():
    request = {"type": "http.request", "body": b'{"model": "a", "text": "b"}', "more_body": False}
    service = app.Service({"a": None}, Metrics(), "")
    assert asyncio.run(call(service, "/inspect", [request, {"type": "http.disconnect"}])) == (
        499,
        b"",
    )


def run(*arguments):
    command = [sys.executable, "-m", "thinker.serving", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b/a"], "two models have the name 'a'; name one of them: NAME=b/a"),
        (["x=a", "x=b"], "two models have the name 'x'; name one of them: NAME=b"),
        (["=a"], "'=a' has no name or no path; use NAME=PATH"),
        (["a", "--max-batch", "0"], "--max-batch is 0; use at least 1"),
        (["a", "--max-queue", "-1"], "--max-queue is -1; use at least 0"),
        (["a", "--port", "65536"], "--port is 65536; use at most 65535, or 0 for a free one"),
        (["a", "--host", "300.1.1.1"], "cannot listen on 300.1.1.1, port 8000: "),
        (
            ["a", "--cors", "example.org"],
            "--cors is 'example.org'; use the scheme and host of a web site",
        ),
        (["a", "--api-key", ""], "--api-key is empty"),
        (["a", "--max-tokens", "0"], "--max-tokens is 0; use at least 1"),
        (
            ["a", "--allowed-host", "https://example.org"],
            "--allowed-host is 'https://example.org'; use a name without scheme and port",
        ),
        (["--port", "0", "no/such/run"], "no/such/run does not exist; use a run directory"),
        ([], "the following arguments are required: PATH"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        done = run("a", "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: cannot listen on 127.0.0.1, port {port}: .*; choose another --port or --host\n",
        done.stderr,
    )


def test_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("usage: thinker-serve [-h]")
    assert "\n  thinker-serve runs/quickstart\n" in text


def test_ctrl_c_ends_with_status_0(served_run, chat_run, start_server):
    server = start_server(f"one={served_run}", f"two={chat_run}")
    assert [
        model["id"] for model in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    ] == ["one", "two"]
    with httpx.stream("GET", f"{server.url}/v1/models", timeout=60):  # an idle connection
        server.signal(signal.SIGINT)
        assert server.wait() == 0
    assert "Traceback" not in server.log
    assert len(server.log.splitlines()) == 3


def test_a_second_ctrl_c_ends_at_once(served_run, start_server):
    server = start_server(served_run, "--host", "0.0.0.0")
    wait_until(
        lambda: "anyone who can reach this machine can use the models; set --api-key" in server.log
    )
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(f"{url}/health", headers={"Host": "a.example"}, timeout=60).status_code == 200
    body = {
        "model": "served",
        "prompt": "a",
        "max_tokens": 10**9,
        "logit_bias": {"299": -1e9},
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # which would close the connection if it were dropped
        next(lines)
        server.signal(signal.SIGINT)
        wait_until(lambda: "finishing 1 request(s); Ctrl-C again to end now" in server.log)
        server.signal(signal.SIGINT)
        assert server.wait() == -signal.SIGINT
