"""Hostile clients, full queues, failing texts and signals: nobody else's text changes, and nothing
leaks."""

import itertools
import json
import random
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hostile import (
    GOOD_BODY,
    SCHEMAS,
    TIMEOUT,
    Connection,
    ask,
    encode_request,
    good_request,
    heavy_bodies,
    malformed_requests,
    refused_requests,
    with_schema,
)
from installed import NAMES

from thinker.data.tokenizers import tokenizer_conversion
from thinker.generation import Generator, SamplingParams
from thinker.interop import load
from thinker.interop.huggingface import save_pretrained
from thinker.serving.engine_thread import MAX_UNREAD

ENDLESS = GOOD_BODY | {
    "max_tokens": 10**9,
    "stream": True,
    "logit_bias": {"299": -1e10},
}  # 299: the end of text


def wait_for(condition):
    """Wait until a condition holds; returns its value."""
    end = time.monotonic() + TIMEOUT
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return value


def gauges(server, *names):
    """The sums of metrics over their labels, all of the same moment."""
    text = ask(server.url, b"", path="/metrics", method="GET").body.decode()
    found = (re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names)
    return tuple(sum(map(float, values)) for values in found)


def texts(server):
    """The numbers of running and waiting texts. A text that slides changes from one to the other
    and back."""
    return gauges(server, "thinker_running_texts", "thinker_waiting_texts")


def count_files(process):
    """The number of open files of a process, such as connections."""
    return len(list((process / "fd").iterdir()))


def resident_bytes(process):
    """The resident memory of a process."""
    return int((process / "statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def generate(served_run):
    """What Generator.generate returns for a request that comes alone: text and finish reason."""
    return reference(served_run)


def reference(path):
    model, tokenizer = load(path)
    generator = Generator(model, tokenizer, slide=True)

    def answer(body):
        options = {
            name: value for name, value in body.items() if name not in ("model", "prompt", "stream")
        }
        length, response_format = options.pop("max_tokens"), options.pop("response_format", None)
        options["stop"] = options.get("stop") or ()
        options["logit_bias"] = {
            int(token): bias for token, bias in (options.get("logit_bias") or {}).items()
        }
        schema = response_format and response_format["json_schema"]["schema"]
        (completion,) = generator.generate(
            body["prompt"], SamplingParams(length, json_schema=schema, **options)
        )
        return completion.text, completion.finish_reason

    return answer


def abandon(url, body, numbers):
    """Send a request and leave at a random moment."""
    data = encode_request(body)
    moment = numbers.choice(["headers", "half of the body", "before the answer", "in the answer"])
    end = {
        "headers": data.index(b"\r\n\r\n") + 4,
        "half of the body": len(data) - len(data) // 4,
    }.get(moment, len(data))
    connection = Connection(url).send(data[:end])
    if moment == "in the answer" and body.get("stream") and connection.begin().status == 200:
        for _ in range(numbers.randrange(30)):
            connection.event()
    elif numbers.random() < 0.5:
        time.sleep(numbers.random() * 0.1)  # the moment is random
    connection.leave(abruptly=numbers.random() < 0.5)


def jobs_of_round(url, n, seed, known):
    """A round of functions without arguments, each of which plays a client; two thirds are good
    ones."""
    numbers = random.Random(0)
    refused, malformed = list(refused_requests()), list(malformed_requests())
    bad = [
        *((check_refused, data) for data in refused),
        *((check_malformed, data) for data in malformed),
    ]
    bad += [(abandon, body) for body in (*heavy_bodies(), *(body for body, _ in known[:20]))] * 2
    numbers.shuffle(bad)
    bad = list(itertools.islice(itertools.cycle(bad), n // 3))
    good = [known[index % len(known)] for index in range(n - len(bad))]

    def check_good(body, expected):
        assert ask(url, body).text == expected, body

    jobs = [lambda body=body, text=text: check_good(body, text) for body, text in good]
    for play, data in bad:
        own = random.Random(numbers.random())
        jobs.append(lambda play=play, data=data, own=own: play(url, data, own))
    random.Random(seed).shuffle(jobs)
    return jobs


def check_refused(url, data, numbers):
    """A refused request gets an error in OpenAI's form; of two in one write, both do."""
    with Connection(url) as connection:
        n = 2 if len(data) < 10_000 and numbers.random() < 0.2 else 1
        connection.send(data * n)
        for _ in range(n):
            answer = connection.answer()
            assert 400 <= answer.status < 500, data[:500]
            error = answer.json["error"]
            assert sorted(error) == ["code", "message", "param", "type"], data[:500]
            assert error["type"].endswith("error"), data[:500]


def check_malformed(url, data, numbers):
    with Connection(url) as connection:
        assert connection.send(data).answer().status == 400, data[:500]


def settled_memory(process, pause):
    """The resident memory after an idle server has given back what it can: when it has not changed
    for 8 pauses."""
    readings = [0]
    while len(readings) < 8 or max(readings[-8:]) != min(readings[-8:]):
        time.sleep(pause)
        readings.append(resident_bytes(process))
    return readings[-1]


def play_round(jobs, n_clients=24):
    """Run all jobs, many at once."""
    with ThreadPoolExecutor(n_clients) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_requests_change_no_text_and_leak_nothing(
    start_server, served_run, chat_run, generate, stress
):  # fmt: skip
    n_requests = 500 if stress else 60
    numbers = random.Random(3)
    known = [
        (body, generate(body))
        for body in (good_request(numbers) for _ in range(n_requests * 2 // 3))
    ]
    server = start_server(
        served_run, chat_run, "--max-queue", 1000, forked=False
    )  # its memory is its own
    process = Path("/proc") / str(server.process.pid)
    assert ask(server.url, GOOD_BODY).text == generate(GOOD_BODY)
    if "structured_output" in NAMES:  # the process that compiles schemas starts, and stays
        assert ask(server.url, with_schema(SCHEMAS[0])).status == 200
    n_open, memory = count_files(process), []
    for seed in range(3):  # the same requests in another order; the first round warms up
        play_round(jobs_of_round(server.url, n_requests, seed, known))
        wait_for(lambda: texts(server) == (0, 0))
        wait_for(lambda: count_files(process) <= n_open)
        memory.append(settled_memory(process, 0.5 if stress else 0.1))
        print(f"round {seed}: {n_requests} requests, {memory[-1] / 2**20:.1f} MiB")
    assert memory[-1] < 1.05 * memory[0]
    server.stop()


def start_all(pool, server, bodies):
    """Send requests at once, and wait until the server has accepted all."""
    answers = [pool.submit(ask, server.url, body) for body in bodies]
    wait_for(lambda: sum(texts(server)) == len(bodies))
    return answers


def long_requests(n, length=800):
    """Requests whose texts do not end early."""
    return [
        ENDLESS | {"seed": seed, "max_tokens": length, "stream": seed % 2 == 0} for seed in range(n)
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_loses_no_accepted_request(start_server, served_run, generate, number):
    server, bodies = start_server(served_run, "--max-batch", 4), long_requests(8)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = start_all(pool, server, bodies)
        slow = encode_request(GOOD_BODY)
        connection = Connection(server.url).send(slow[:-5])
        wait_for(
            lambda: ask(server.url, b"", path="/health", method="GET").status == 200
        )  # read after the above
        server.signal(number)
        wait_for(
            lambda: (
                ask(server.url, b"", path="/health", method="GET").json == {"status": "draining"}
            )
        )
        refusal = ask(server.url, GOOD_BODY)
        assert (refusal.status, refusal.json["error"]["type"]) == (503, "server_error")
        assert connection.send(slow[-5:]).answer().text == generate(GOOD_BODY)
        connection.leave()
        for body, answer in zip(bodies, answers):
            assert answer.result().text == generate(body)
    assert server.wait() == 0
    assert "Traceback" not in server.log
    with pytest.raises(ConnectionError):
        Connection(server.url)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start_server, served_run, number):
    server = start_server(served_run)
    with Connection(server.url) as connection:
        connection.send(encode_request(ENDLESS)).begin()
        server.signal(number)
        wait_for(lambda: "finishing 1 request" in server.log)
        server.signal(number)
        assert server.wait() == -number
    assert "Traceback" not in server.log


def test_a_full_queue_refuses_and_affects_nobody(start_server, served_run, generate):
    server, bodies = start_server(served_run, "--max-batch", 2, "--max-queue", 2), long_requests(4)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = start_all(pool, server, bodies)
        for extra in ({}, {"stream": True}, {"n": 2}):
            refusal = ask(server.url, GOOD_BODY | extra)
            assert (refusal.status, refusal.json["error"]["code"]) == (429, "queue_full")
            assert int(refusal.headers["retry-after"]) >= 1
        for body, answer in zip(bodies, answers):
            assert answer.result().text == generate(body)
    assert ask(server.url, GOOD_BODY).text == generate(GOOD_BODY)
    server.stop()


@pytest.fixture(scope="module")
def fragile_run(served_run, tmp_path_factory):
    """A model whose logits overflow after one token: only that token uses one of the dimensions."""
    model, tokenizer = load(served_run)
    poison, dimension = 200, 3
    with torch.no_grad():
        model.embedding.weight[:, dimension] = 0
        model.embedding.weight[poison, dimension] = 1e6
        model.lm_head.weight[:, dimension] = 3e38
        for block in model.blocks:
            block.attention.o_proj.weight[dimension] = 0
            block.mlp.down_proj.weight[dimension] = 0
    folder = tmp_path_factory.mktemp("models") / "served"
    folder.mkdir()
    save_pretrained(model, tokenizer, folder)
    tokenizer_conversion.write(tokenizer, folder, model.config.max_seq_len)
    return folder


@pytest.mark.parametrize("flags", [[], ["--no-compile"]], ids=["compiled", "torch"])
def test_a_failing_text_takes_no_other_with_it(start_server, fragile_run, flags):
    server = start_server(fragile_run, *flags)
    known = reference(fragile_run)
    bodies = [body | {"temperature": 0} for body in long_requests(4, 200)]
    with ThreadPoolExecutor(8) as pool:
        answers = start_all(pool, server, bodies)
        for stream in (False, True):
            answer = ask(server.url, GOOD_BODY | {"prompt": [1, 2, 200], "stream": stream})
            error = (answer.events[-1] if stream else answer.json)["error"]
            assert answer.status == 200 if stream else 500
            assert error["type"] == "server_error"
            assert "non-finite" in error["message"]
        for body, answer in zip(bodies, answers):
            assert answer.result().text == known(body)
    assert ask(server.url, bodies[1]).text == known(bodies[1])
    assert texts(server) == (0, 0)
    server.stop()


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reader_that_stops_costs_little_and_delays_nobody(start_server, served_run, generate):
    server = start_server(served_run, "--max-batch", 2)
    process = Path("/proc") / str(server.process.pid)
    assert ask(server.url, GOOD_BODY).text == generate(GOOD_BODY)
    before = resident_bytes(process)
    with Connection(server.url) as connection:  # large events soon fill the buffers of the kernel
        connection.send(encode_request(ENDLESS | {"logprobs": 10})).begin()
        assert ask(server.url, GOOD_BODY).text == generate(GOOD_BODY)
        wait_for(lambda: texts(server) == (0, 0))  # given up, since nobody reads it
        assert resident_bytes(process) - before < 64 << 20
        events = list(iter(connection.event, None))
    assert "were not read" in events[-1]["error"]["message"]
    text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
    expected, _ = generate(ENDLESS | {"max_tokens": 500})
    assert text[: len(expected) - 10] == expected[:-10]  # the last character may be incomplete
    assert gauges(server, "thinker_generated_tokens_total") > (MAX_UNREAD,)
    server.stop()


def test_a_slow_reader_gets_its_text(start_server, served_run, generate):
    server = start_server(served_run)
    body = long_requests(1, 100)[0]
    with Connection(server.url, receive_buffer=4096) as connection:
        connection.send(encode_request(body))
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.socket.recv(1)
    chunks = [
        json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")
    ]
    assert (
        "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        == generate(body)[0]
    )
    server.stop()


def test_a_client_that_leaves_frees_its_row(start_server, served_run, generate):
    server = start_server(served_run, "--max-batch", 1)
    for abruptly in (False, True):
        first = Connection(server.url).send(encode_request(ENDLESS))
        assert first.begin().status == 200
        first.event()
        with ThreadPoolExecutor() as pool:
            second = pool.submit(ask, server.url, GOOD_BODY)
            wait_for(lambda: texts(server) == (1, 1))
            assert not second.done()
            first.leave(abruptly)
            assert second.result().text == generate(GOOD_BODY)
    assert gauges(server, "thinker_generated_tokens_total") < (
        MAX_UNREAD,
    )  # which would end it, too
    wait_for(lambda: texts(server) == (0, 0))
    server.stop()


@pytest.mark.parametrize("leaver", [0, 1])
def test_of_two_equal_requests_that_wait_the_right_one_is_cancelled(
    start_server, served_run, generate, leaver
):
    server = start_server(served_run, "--max-batch", 1)
    with Connection(server.url) as first:
        first.send(encode_request(ENDLESS)).begin()
        first.event()
        equal = []
        for n_waiting in (1, 2):
            equal.append(Connection(server.url).send(encode_request(GOOD_BODY)))
            wait_for(lambda n_waiting=n_waiting: texts(server) == (1, n_waiting))
        equal[leaver].leave()
        wait_for(lambda: texts(server) == (1, 1))
    assert equal[1 - leaver].answer().text == generate(GOOD_BODY)
    server.stop()
