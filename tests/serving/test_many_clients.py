"""Mixed requests of many clients at once, each on a connection that stays open: no failure, and
everyone gets the text that the engine makes for it alone."""

import asyncio
import contextlib
import random

import httpx
import pytest
from conftest import run_script
from hostile import good_request
from test_equality import ask
from test_hostile_clients import reference

MISTAKES = [
    {"temperature": -1},
    {"max_tokens": 0},
    {"prompt": [10**6]},
    {"model": "nobody"},
    {"no such field": 1},
]


@pytest.fixture(scope="module")
def patterned_run(train_args, tmp_path_factory):
    """A run whose attention has patterns, called "patterned"."""
    folder = tmp_path_factory.mktemp("runs") / "patterned"
    options = ["model.attention=window(24) | global(4)", "train.max_steps=10", "data.seq_len=160"]
    done = run_script(*train_args, f"run.dir={folder}", *options)
    assert done.returncode == 0, done.stderr
    return folder


async def check_good(client, body, expected):
    assert await ask(client, body, random.Random(0), 0) == expected, body


async def check_refused(client, body):
    answer = await client.post("/v1/completions", json=body)
    assert 400 <= answer.status_code < 500, body
    assert answer.json()["error"]["message"]


async def leave_early(client, body, seconds):
    """Close the connection while the answer is being made."""
    late = (TimeoutError, asyncio.TimeoutError)  # two classes before Python 3.11
    with contextlib.suppress(*late):
        await asyncio.wait_for(client.post("/v1/completions", json=body), seconds)


def make_jobs(known, n_requests):
    """Functions of a client: most are good requests, 5% each have a mistake and leave early."""
    numbers = random.Random(1)
    jobs = []
    for number in range(n_requests):
        body, expected = known[number % len(known)]
        kind = numbers.random()
        if kind < 0.05:
            wrong = body | numbers.choice(MISTAKES)
            jobs.append(lambda client, wrong=wrong: check_refused(client, wrong))
        elif kind < 0.1:
            long = body | {"max_tokens": 10**6, "stream": False}
            seconds = numbers.random()
            jobs.append(lambda client, long=long, s=seconds: leave_early(client, long, s))
        else:
            jobs.append(
                lambda client, body=body, expected=expected: check_good(client, body, expected)
            )
    numbers.shuffle(jobs)
    return jobs


async def play(url, jobs, n_clients):
    """Let clients take jobs until none is left; each client has one connection."""
    waiting = iter(jobs)

    async def work():
        one = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=one) as client:
            for job in waiting:
                await job(client)

    await asyncio.gather(*(work() for _ in range(n_clients)))


def test_mixed_requests_of_many_clients(start_server, served_run, patterned_run, stress):
    n_requests, n_clients, n_known = (5000, 200, 400) if stress else (300, 40, 40)
    numbers = random.Random(0)
    known = []
    for path in (served_run, patterned_run):
        generate = reference(path)
        for _ in range(n_known // 2):
            body = good_request(numbers) | {"model": path.name}
            known.append((body, generate(body)))
    server = start_server(served_run, patterned_run, "--max-queue", 1000)
    asyncio.run(play(server.url, make_jobs(known, n_requests), n_clients))
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    counted = [line for line in metrics.splitlines() if line.startswith("thinker_requests_total")]
    assert counted
    assert not [line for line in counted if 'status="5' in line], counted
    answered = server.metric("thinker_requests_total", status="200", path="/v1/completions")
    assert answered >= 0.85 * n_requests
    server.stop()
