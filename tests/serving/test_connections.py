"""Connections: no answer waits in a buffer, and clients that send half of a request are closed."""

import time

import httpx


def test_answers_on_an_open_connection_do_not_wait(server):
    """With Nagle's algorithm, the body of an answer waits for the client's delayed acknowledgement
    of the headers: 40 ms or more on Linux."""
    seconds = []
    with httpx.Client(base_url=server.url) as client:
        for _ in range(20):
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            seconds.append(time.perf_counter() - start)
    assert min(seconds[1:]) < 0.02
