"""A request gets the text that generate.py prints for its seed, whatever comes beside it."""

import asyncio
import json
import random

import httpx
import pytest
from conftest import ROOT, run_script

from thinker.generation import Generator, SamplingParams
from thinker.interop import load

N_REQUESTS = 64
PROMPTS = [
    "",
    "L",
    "Line 7: the cat",
    "Line 7: the cat sat on",
    "the " * 30,
    "mat number 3.\n" * 5,
    "é漢",
]


def random_request(numbers):
    """Any prompt, length, seed and settings."""
    settings = {
        "temperature": [0.0, 0.8, 1.0], "top_k": [None, 5], "top_p": [1.0, 0.8], "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.3], "presence_penalty": [0.0, 0.5], "frequency_penalty": [0.0, 0.5],
        "stop": [None, ["cat", "7"]], "logit_bias": [None, {"97": 2.0}],
    }  # fmt: skip
    names = settings if numbers.random() < 0.6 else ["temperature"]
    chosen = {name: numbers.choice(settings[name]) for name in names}
    length, seed = numbers.choice([1, 5, 40, 200]), numbers.randrange(1000)
    return {
        "model": "served",
        "prompt": numbers.choice(PROMPTS),
        "max_tokens": length,
        "seed": seed,
        **chosen,
    }


async def ask(client, body, numbers, pauses):
    """The text and finish reason of a request that is sent at a random time."""
    await asyncio.sleep(numbers.random() * pauses)
    if not body.get("stream"):
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    text, reason = "", None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, reason = text + choice["text"], choice["finish_reason"]
    return text, reason


async def ask_all(url, bodies, seed, pauses):
    numbers = random.Random(seed)
    order = list(range(len(bodies)))
    numbers.shuffle(order)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        answers = await asyncio.gather(
            *(ask(client, bodies[index], numbers, pauses) for index in order)
        )
    return dict(zip(order, answers))


@pytest.fixture(scope="module")
def requests():
    numbers = random.Random(1)
    return [random_request(numbers) for _ in range(N_REQUESTS)]


@pytest.fixture(scope="module")
def known(served_run, requests):
    """What generate.py prints: it calls generate() with these parameters."""
    model, tokenizer = load(served_run)
    generator, answers = Generator(model, tokenizer, slide=True), []
    for body in requests:
        options = {
            name: value
            for name, value in body.items()
            if name not in ("model", "prompt", "max_tokens")
        }
        options["stop"], options["logit_bias"] = (
            options.get("stop") or (),
            options.get("logit_bias") or {},
        )
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        (completion,) = generator.generate(
            body["prompt"], SamplingParams(body["max_tokens"], **options)
        )
        answers.append((completion.text, completion.finish_reason))
    return answers


@pytest.mark.parametrize(("seed", "pauses"), [(1, 0.0), (2, 3.0)], ids=["at once", "over 3 s"])
@pytest.mark.parametrize("stream", [False, True])
def test_64_requests_get_the_texts_of_generate(server, requests, known, stream, seed, pauses):
    bodies = [body | {"stream": stream} for body in requests]
    answers = asyncio.run(ask_all(server.url, bodies, seed, pauses))
    for index, answer in answers.items():
        assert answer == known[index], requests[index]


def test_a_text_is_what_generate_py_prints(server, served_run):
    body = {
        "model": "served",
        "prompt": "Line 3",
        "max_tokens": 200,
        "seed": 5,
        "temperature": 0.9,
        "top_p": 0.95,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=None).json()["choices"][
        0
    ]
    assert answer["seed"] == 5
    flags = [
        "--prompt",
        "Line 3",
        "--max-new-tokens",
        200,
        "--seed",
        5,
        "--temperature",
        0.9,
        "--top-p",
        0.95,
    ]
    printed = json.loads(run_script(ROOT / "generate.py", served_run, *flags, "--json").stdout)
    assert (printed["text"], printed["finish_reason"]) == (answer["text"], answer["finish_reason"])
