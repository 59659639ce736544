"""What the API refuses, and what happens to clients that give up, through OpenAI's own client."""

import json
import signal
import threading

import httpx
import openai
import pytest
from installed import if_installed, needs
from server_process import wait_until

from thinker.runtime.errors import UserError
from thinker.serving.protocol import CompletionRequest, refusal

MESSAGES = [{"role": "user", "content": "Hi 3"}]
ENDLESS = {
    "prompt": "L",
    "max_tokens": 10**9,
    "logit_bias": {"299": -1e9},
}  # without the BOS token, which ends texts


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_client_that_gives_up_frees_its_row(server, client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="served", **ENDLESS)
    wait_until(lambda: server.metric("thinker_running_texts") == 0)
    with client.completions.create(model="served", **ENDLESS, stream=True) as stream:
        next(stream)
        assert server.metric("thinker_running_texts") == 1
    wait_until(lambda: server.metric("thinker_running_texts") == 0)


JSON = {"Content-Type": "application/json"}
GOOD = {"model": "served", "prompt": "L"}
GOOD_CHAT = {"model": "chat", "messages": MESSAGES}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
MISTAKES = [  # fields, the field at fault, part of the message
    ({"prompt": None}, "prompt", "prompt is missing; pass a string"),
    ({"prompt": []}, "prompt", "prompt is []; use a string"),
    ({"prompt": [[]]}, "prompt", "use a string, a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt", "use a string, a list of token ids"),
    ({"prompt": [10**6]}, "prompt", "the prompt has the token id 1000000; use ids from 0 to 299"),
    ({"prompt": "word " * 300}, "prompt", "the model served reads at most 160"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; use an integer of at least 1, or 0 with"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens is -1; use an integer"),
    ({"max_tokens": "4"}, "max_tokens", 'max_tokens is "4"'),
    ({"max_tokens": True}, "max_tokens", "max_tokens is true"),
    ({"temperature": -1}, "temperature", "use 0 (greedy) or a positive number"),
    ({"temperature": "hot"}, "temperature", 'temperature is "hot"'),
    ({"top_p": 0}, "top_p", "use a number in (0, 1]"),
    ({"top_k": 0}, "top_k", "use an integer of at least 1"),
    ({"seed": -1}, "seed", "use an integer from 0"),
    ({"stop": ""}, "stop", "use a non-empty string"),
    ({"stop": ["a"] * 17}, "stop", "up to 16"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "from token ids to numbers"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias", "use ids from 0 to 299"),
    # Two keys of one id: the server would have to choose.
    *(
        ({"logit_bias": {"5": 1, key: 2}}, "logit_bias", "from token ids to numbers")
        for key in ("05", "+5", " 5", "0_5", "٥", "5" * 5000)
    ),
    ({"prompt_cache_options": {"a": [float("nan")]}}, "prompt_cache_options", "is not finite"),
    ({"x" * 90_000: 1}, "x" * 500 + " ... " + "x" * 500, "is not supported here"),
    ({"logprobs": 21}, "logprobs", "use an integer from 0 to 20"),
    ({"n": 129}, "n", "use an integer from 1 to 128"),
    ({"n": 100}, "n", "this server decodes and queues at most 80"),
    ({"prompt": ["a"] * 81}, "n", "this server decodes and queues at most 80"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "has no effect without stream"),
    *if_installed(
        "structured_output",
        (
            {"response_format": SCHEMA},
            "response_format",
            "json_schema cannot be used: Invalid type: nothing",
        ),
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema goes with the type json_schema",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", 'use {"type": "text"}'),
    ({"best_of": 3}, "best_of", "best_of is 3; use 1, or the number n of choices"),
    ({"suffix": "end"}, "suffix", "use no text: the model only continues"),
    ({"tools": []}, "tools", "tools is not supported here"),
    ({"metadata": {"a": 1}}, "metadata", "use an object of strings"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
        "no obfuscation",
    ),
    ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
    ({"model": None}, "model", "model is missing; pass the id of a model"),
    (
        {"model": "served", "prompt": "L", "top_logprobs": 3},
        "top_logprobs",
        "did you mean logprobs?",
    ),
]
CHAT_MISTAKES = [
    ({"messages": []}, "messages", 'use a list of {"role": "user"'),
    ({"messages": "Hi"}, "messages", 'messages is "Hi"'),
    ({"messages": [{"role": "user"}]}, "messages", "with text only"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "with text only"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        "text only",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "weight": 0}]},
        "messages.0.weight",
        "is not supported here",
    ),
    ({"reasoning_effort": "high"}, "reasoning_effort", 'use "none"'),
    ({"verbosity": "low"}, "verbosity", 'use "medium"'),
    ({"modalities": ["text", "audio"]}, "modalities", 'use ["text"]'),
    ({"audio": {"voice": "ash"}}, "audio", "audio is not supported here; remove it"),
    ({"web_search_options": {}}, "web_search_options", "is not supported here; remove it"),
    ({"functions": []}, "functions", "is not supported here; remove it; use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    ({"echo": True}, "echo", "echo is not supported here"),
    (
        {"messages": [{"role": "user", "content": "word " * 300}]},
        "messages",
        "the model chat reads at most 160",
    ),
    ({"top_logprobs": 3}, "top_logprobs", "set logprobs to true"),
    ({"logprobs": 3}, "logprobs", "use true or false"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "mean the same; use one"),
    (
        {"model": "served"},
        "model",
        "has no chat template: it was not trained on chats; use /v1/completions",
    ),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        *(("completions", *mistake) for mistake in MISTAKES),
        *(("chat/completions", *one) for one in CHAT_MISTAKES),
    ],
)
def test_mistakes_name_the_field(client, path, fields, param, message):
    body = (GOOD if path == "completions" else GOOD_CHAT) | fields
    with pytest.raises(openai.BadRequestError) as caught:  # as text: httpx writes no NaN
        client.post(f"/{path}", content=json.dumps(body), cast_to=object, options={"headers": JSON})
    error = caught.value
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert message in error.body["message"]
    assert "\n" not in error.body["message"]
    assert len(error.body["message"]) < 1100
    too_long = "word" in str(fields)
    assert error.code == ("context_length_exceeded" if too_long else error.code)


@needs("structured_output")
def test_a_schema_that_is_too_complex_is_refused_each_time(client):
    """It shows only while the text grows; in a stream, after the status was sent."""
    schema = {"type": "string", "pattern": "^(([ab]{1,99}a|b){99,999}){1,999}$"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ask = GOOD | {"response_format": form, "max_tokens": 10**9, "seed": 1}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="json_schema is too complex") as caught:
            client.post("/completions", body=ask, cast_to=object)
        assert caught.value.param == "response_format"
        with pytest.raises(openai.APIError, match="json_schema is too complex") as caught:
            list(client.completions.create(**GOOD, stream=True, extra_body=ask | {"stream": True}))
        assert (caught.value.type, caught.value.param) == (
            "invalid_request_error",
            "response_format",
        )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("json_schema cannot be used: no token can begin it", "response_format"),
        ("the prompt is too long", "prompt"),
        ("temperature is hot", "temperature"),
        ("no field is at fault", None),  # which is not the field n
    ],
)
def test_a_refusal_of_the_engine_names_its_field(message, param):
    error = refusal(UserError(message), CompletionRequest(**GOOD))
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 9999, b'{"seed": ' + b"1" * 9999 + b"}"]
)
def test_a_body_that_is_no_json_object(client, body):
    with pytest.raises(openai.BadRequestError, match="not a valid JSON object") as caught:
        client.post("/completions", content=body, cast_to=object, options={"headers": JSON})
    assert caught.value.code == "invalid_json"


def test_unknown_models_and_paths(client):
    for ask in (
        lambda: client.models.retrieve("chatt"),
        lambda: client.completions.create(model="chatt", prompt="a"),
        lambda: client.chat.completions.create(model="chatt", messages=MESSAGES),
        lambda: client.chat.completions.create(model="chatt", messages=MESSAGES, stream=True),
    ):
        with pytest.raises(
            openai.NotFoundError, match="there is no model 'chatt'; did you mean chat?"
        ) as caught:
            ask()
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="there is no /v1/embeddings here"):
        client.embeddings.create(model="served", input="a")


def test_wrong_methods_types_and_sizes(client):
    with pytest.raises(openai.APIStatusError, match="GET is not allowed here; use POST") as caught:
        client.get("/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.response.headers["Allow"]) == (405, "POST")
    with pytest.raises(
        openai.APIStatusError, match="send Content-Type: application/json"
    ) as caught:
        client.post(
            "/completions",
            body=GOOD,
            cast_to=object,
            options={"headers": {"Content-Type": "text/plain"}},
        )
    assert caught.value.status_code == 415
    for n_bytes in (1 << 20, 1 << 25):
        with pytest.raises(
            openai.APIStatusError, match="more than 1048576 bytes; see --max-body"
        ) as caught:
            client.completions.create(model="served", prompt="a" * n_bytes)
        assert caught.value.status_code == 413


def test_the_api_key(served_run, start_server):
    url = f"{start_server(served_run, '--api-key', 'sésame').url}/v1"
    with pytest.raises(
        openai.AuthenticationError, match="send the header Authorization: Bearer KEY"
    ) as caught:
        openai.OpenAI(base_url=url, api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["WWW-Authenticate"] == "Bearer"
    headers = {"Authorization": "bearer sésame".encode()}
    assert httpx.get(f"{url}/models", headers=headers, timeout=60).status_code == 200
    assert (
        httpx.get(
            f"{url}/models", headers={"Authorization": "sésame".encode()}, timeout=60
        ).status_code
        == 401
    )


def test_a_full_server_and_one_that_shuts_down(served_run, start_server):
    server = start_server(served_run, "--max-batch", "1", "--max-queue", "0")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        running = client.completions.create(model="served", **ENDLESS, stream=True)
        next(running)
        with pytest.raises(
            openai.RateLimitError, match="served is busy; try again in 1 s"
        ) as caught:
            client.completions.create(**GOOD)
        assert (caught.value.code, caught.value.response.headers["Retry-After"]) == (
            "queue_full",
            "1",
        )
        retried = []
        ask = client.with_options(max_retries=9).completions.with_raw_response.create
        patient = threading.Thread(target=lambda: retried.append(ask(**GOOD, seed=1)))
        patient.start()
        wait_until(lambda: server.metric("thinker_requests_total", status="429") == 2)
        running.close()
        patient.join()
        assert retried[0].parse().choices[0].seed == 1

        running = client.completions.create(model="served", **ENDLESS, stream=True)
        next(running)
        server.signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=60).status_code == 503)
        assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "draining"}
        with pytest.raises(
            openai.InternalServerError, match="the server is shutting down"
        ) as caught:
            client.completions.create(**GOOD)
        assert (caught.value.status_code, caught.value.response.headers["Retry-After"]) == (
            503,
            "5",
        )
        assert (
            sum(len(chunk.choices) for chunk, _ in zip(running, range(500))) == 500
        )  # what runs goes on
        running.close()
    assert server.wait() == 0
    assert "finishing 1 request(s)" in server.log
