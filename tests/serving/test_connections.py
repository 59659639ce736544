"""Connections: no answer waits in a buffer, and clients that send half of a request are closed."""

import contextlib
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hostile import Connection, encode_request
from server_process import wait_until

from thinker.serving import app
from thinker.serving import server as serving_server
from thinker.serving.api_errors import ApiError
from thinker.serving.app import Service, create_app
from thinker.serving.protocol import CompletionRequest, parse
from thinker.serving.server_metrics import Metrics


def test_answers_on_an_open_connection_do_not_wait(server):
    """With Nagle's algorithm, the body of an answer waits for the client's delayed acknowledgement
    of the headers: 40 ms or more on Linux."""
    seconds = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(20):
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < 0.02


@pytest.fixture
def impatient_server(monkeypatch):
    """The port of a server that waits for headers for half a second."""
    monkeypatch.setattr(serving_server, "HEADER_SECONDS", 0.5)
    service = Service({}, Metrics(), page="")
    server = serving_server.DrainingServer(create_app(service, []), service, print)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def read_to_end(connection):
    """What a server sends before it closes a connection."""
    received = b""
    while part := connection.recv(4096):
        received += part
    return received


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("sent", [b"", b"G", HEAD], ids=["nothing", "a letter", "all but one line"])
@pytest.mark.parametrize("is_kept_open", [False, True])
def test_half_of_a_request_is_given_up(impatient_server, sent, is_kept_open):
    with socket.create_connection(("127.0.0.1", impatient_server), timeout=60) as connection:
        if is_kept_open:
            connection.sendall(HEAD + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            if not sent:
                return  # an open connection may wait for its next request for longer
        connection.sendall(sent)
        assert b"HTTP/1.1" not in read_to_end(connection)


def test_letters_one_by_one_do_not_extend_the_time(impatient_server):
    with socket.create_connection(("127.0.0.1", impatient_server), timeout=60) as connection:
        connection.settimeout(0.05)
        for _ in range(200):
            connection.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                assert connection.recv(1) == b""
                return  # closed
    raise AssertionError("still open after 10 s")


def test_a_connection_between_two_requests_is_kept(impatient_server):
    with httpx.Client(base_url=f"http://127.0.0.1:{impatient_server}", timeout=60) as client:
        first = client.get("/health").extensions["network_stream"]
        time.sleep(1)  # longer than headers may take
        assert client.get("/health").extensions["network_stream"] is first


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limits of another process")
def test_a_lack_of_files_fills_no_log(start_server, served_run):
    import resource

    server = start_server(served_run)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200  # its event loop runs
    n_open = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (n_open + 9, n_open + 9))
    size = len(server.log)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    connections = [socket.create_connection(address, timeout=60) for _ in range(30)]
    wait_until(lambda: len(server.log) > size)
    time.sleep(3)  # asyncio tries once per second
    assert server.log[size:].count("\n") == 1
    assert "cannot accept connections (Too many open files)" in server.log
    for connection in connections:
        connection.close()
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    server.stop()


def test_two_lengths_are_refused(server):
    body = b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    request = encode_request(body, Content_Length=len(body), Transfer_Encoding="chunked")
    with Connection(server.url) as connection:
        answer = connection.send(request).answer()
        assert answer.status == 400
        if answer.headers["content-type"] == "application/json":  # httptools refuses it itself
            assert "Content-Length and Transfer-Encoding" in answer.json["error"]["message"]
        assert connection.socket.recv(1) == b""  # nothing that follows is read as a request


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inspect"])
def test_a_body_is_parsed_while_others_are_answered(impatient_server, monkeypatch, path):
    is_answered = threading.Event()

    def parse_slowly(kind, body):
        assert is_answered.wait(60)
        return parse(kind, body)

    monkeypatch.setattr(app, "parse", parse_slowly)
    url = f"http://127.0.0.1:{impatient_server}"
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "none", "prompt": "a"}
        asking = pool.submit(httpx.post, f"{url}{path}", json=body, timeout=60)
        for _ in range(5):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        is_answered.set()
    assert asking.result().status_code in (400, 404)


def test_a_body_of_many_mistakes_is_refused_soon():
    """A list of all mistakes took longer than everything else."""
    fields = {f"field {number}": 1 for number in range(100_000)}
    body = json.dumps({"model": "served", "prompt": "a", **fields}).encode()
    start = time.perf_counter()
    json.loads(body)
    seconds_to_read = time.perf_counter() - start
    start = time.perf_counter()
    with pytest.raises(ApiError, match="field 0 is not supported here"):
        parse(CompletionRequest, body)
    assert time.perf_counter() - start < 5 * seconds_to_read + 0.1
