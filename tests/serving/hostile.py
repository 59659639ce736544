"""Requests over raw sockets, without the politeness of a client library: good, refused, malformed
and abandoned."""

import contextlib
import http.client
import io
import json
import socket
import struct
from dataclasses import dataclass, field

from installed import NAMES
from test_equality import random_request

TIMEOUT = 120  # only guards against hanging
GOOD_BODY = {"model": "served", "prompt": "Line 7", "max_tokens": 40, "seed": 1}
SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name"],
    },
    {"type": "array", "items": {"enum": ["cat", "mat", 7]}, "minItems": 3},
]


def encode_request(body, path="/v1/completions", method="POST", **headers):
    """The bytes of a request. `body`: bytes, or anything for JSON. Headers with the value None are
    left out."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "127.0.0.1",
        "Content_Type": "application/json",
        "Content_Length": len(body),
    } | headers
    lines = [
        f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value is not None
    ]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


@dataclass
class Answer:
    """What a server answered."""

    status: int
    headers: dict
    body: bytes = b""
    events: list = field(default_factory=list)  # of a stream, parsed

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def text(self):
        """The text and finish reason of the only choice."""
        if not self.events:
            (choice,) = self.json["choices"]
            return choice["text"], choice["finish_reason"]
        assert self.events[-1] == "[DONE]", self.events[-1]
        choices = [choice for event in self.events[:-1] for choice in event["choices"]]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


class KeptOpen(io.BufferedReader):
    """Stays open when http.client closes it after an answer, since the next answer may be in its
    buffer."""

    def close(self):
        pass


class Connection:
    """A connection to a server; send any bytes, read answers, leave at any time."""

    def __init__(self, url, receive_buffer=None):
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        host, port = url.removeprefix("http://").split(":")
        self.socket.connect((host, int(port)))
        self.file = KeptOpen(socket.SocketIO(self.socket, "r"))

    def send(self, data):
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # answered before it read everything
            self.socket.sendall(data)
        return self

    def begin(self):
        """Read the status and headers of an answer."""
        self.response = http.client.HTTPResponse(self.socket)
        self.response.fp.close()
        self.response.fp = self.file
        self.response.begin()
        return Answer(self.response.status, dict(self.response.headers))

    def event(self):
        """The next event of a stream, parsed; None at its end."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                return "[DONE]" if line == b"data: [DONE]\n" else json.loads(line[6:])
        return None

    def answer(self):
        """Read a whole answer."""
        answer = self.begin()
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.events = list(iter(self.event, None))
        else:
            answer.body = self.response.read()
        return answer

    def leave(self, abruptly=False):
        """Close the connection; abruptly, with a reset."""
        if abruptly:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.leave()


def ask(url, body, **options):
    """Send a request and read the answer."""
    with Connection(url) as connection:
        return connection.send(encode_request(body, **options)).answer()


def good_request(numbers):
    """Any settings, also schemas, streamed or not."""
    body = random_request(numbers) | {"stream": numbers.random() < 0.5}
    if numbers.random() < 0.2 and "structured_output" in NAMES:
        schema = {"name": "x", "schema": numbers.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def with_schema(schema, **fields):
    """A request for JSON of a schema."""
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return GOOD_BODY | {"response_format": response_format} | fields


def raw(text):
    """The bytes of a request whose JSON has this text in place of a prompt."""
    return encode_request(
        b'{"model": "served", "prompt": ' + text.encode("utf-8", "surrogatepass") + b"}"
    )


def _refused_bodies():
    """Bodies of completions with a mistake."""
    wrong = [None, True, -1, 1.5, "x", [], {}, [[]], [None], {"a": 1}, 10**30, -(10**30), 1e308]
    accepted = {  # JSON of the values that are no mistake
        "model": [], "prompt": ['"x"'], "max_tokens": ["10" + "0" * 29], "top_p": [],
        "temperature": ["1.5", "10" + "0" * 29],
        "top_k": ["null", "10" + "0" * 29], "n": [], "seed": ["null"], "stop": ["null", '"x"', "[]"],
        "stream": ["true"], "logprobs": ["null"], "logit_bias": ["null", "{}"], "response_format": ["null"],
        "presence_penalty": ["-1", "1.5", "1" + "0" * 30, "-1" + "0" * 30],
    }  # fmt: skip
    for name, right in accepted.items():
        yield from (GOOD_BODY | {name: value} for value in wrong if json.dumps(value) not in right)
    yield from [
        GOOD_BODY | {"model": "serve"},
        GOOD_BODY | {"bogus": 1},
        GOOD_BODY | {"x" * 100_000: 1},
    ]
    yield from (
        GOOD_BODY | {"prompt": prompt}
        for prompt in ([[1], []], [300], [-1], [10**400], "x" * 9000, [1] * 161)
    )
    yield from (GOOD_BODY | {"stop": stop} for stop in ("", ["a", ""], ["x"] * 17))
    yield from (
        GOOD_BODY | {"logit_bias": bias} for bias in ({"x": 1}, {"-1": 1}, {"300": 1}, {"1": 1e101})
    )
    yield from [
        GOOD_BODY | {"n": 129},
        GOOD_BODY | {"n": 10**9},
        GOOD_BODY | {"stream_options": {}},
    ]
    many = {f"p{i}": {"type": "integer"} for i in range(20_000)}
    pairs = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    for schema in (
        {"type": "bogus"}, {"bogus": 1}, {"$ref": "#"}, {"$ref": "http://x/y"}, {"$defs": pairs, "$ref": "#/$defs/a"},
        {"pattern": "(", "type": "string"}, {"pattern": "(?=a)b", "type": "string"}, {"properties": many},
        {"type": "number", "multipleOf": 1e-300}, {"enum": []}, {"type": "string", "format": "bogus"},
    ):  # fmt: skip
        yield with_schema(schema)


def refused_requests():
    """Requests that get a status of 4xx, and an error in OpenAI's form."""
    yield from map(encode_request, _refused_bodies())
    size = 1 << 20
    yield encode_request(GOOD_BODY | {"prompt": "x" * size})
    for item in ("{}", "[1.5]", "1", "null", '"x"', "[]"):
        yield raw(f"[{','.join([item] * (size // (len(item) + 1) - 100))}]")
    fields = ",".join(f'"{i}": 1' for i in range(50_000))
    yield raw(f'"x", {fields}')
    for text in (
        "[" * 100_000,
        '{"a":' * 100_000,
        "NaN",
        "1" * 5000,
        "1e999",
        r'"\ud800"',
        '"\ud800"',
        '"',
        "[1,]",
    ):
        yield raw(text)
    for body in (
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"\x00" * 1000,
        '{"model": "served"}'.encode("utf-16"),
    ):
        yield encode_request(body)
    yield encode_request(
        {"model": "served", "messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"
    )
    yield encode_request({"model": "chat", "messages": [{"role": 1}]}, "/v1/chat/completions")
    yield encode_request({"model": "served"}, "/inspect")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "\xff", None):
        yield encode_request(GOOD_BODY, Content_Type=kind)
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "BREW"):
        yield encode_request(GOOD_BODY, method=method)
    for path in (
        "/nope",
        "//v1/completions",
        "/v1/completions/..",
        "/%zz",
        "/%00",
        "*",
        "/v1/models/x",
    ):
        yield encode_request(GOOD_BODY, path)
    yield encode_request(GOOD_BODY, Host="evil.example")
    yield encode_request(
        b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n', Content_Length=None, Transfer_Encoding="chunked"
    )


def malformed_requests():
    """Bytes that are no HTTP/1.1; uvicorn answers them in its own form."""
    yield b"\x16\x03\x01\x00\xff garbage\r\n\r\n"
    yield encode_request(GOOD_BODY, Content_Length=-5)
    yield encode_request(GOOD_BODY, Content_Length="5\r\nContent-Length: 6")
    yield encode_request(b"ZZZ\r\nhello\r\n", Content_Length=None, Transfer_Encoding="chunked")
    yield encode_request(GOOD_BODY, X="a\x00b")


def heavy_bodies():
    """Requests that are correct and ask for as much as they can; those that send them leave in the
    end."""
    yield GOOD_BODY | {"max_tokens": 10**30, "stream": True}
    yield GOOD_BODY | {"max_tokens": 10**9, "n": 8, "logprobs": 20, "stream": True}
    yield GOOD_BODY | {"logit_bias": {str(i): -1e100 for i in range(300)}, "max_tokens": 10**9}
    yield GOOD_BODY | {"stop": ["a" * 60_000 + "b"] * 16, "max_tokens": 10**9, "stream": True}
    for pattern in (
        "(a{1,1000}){1,1000}",
        "(.*a){25}",
        "(x+x+)+y",
        "(a?){5000}a{5000}",
        "((((a{99}){99}){99}){99})",
    ):
        yield with_schema({"type": "string", "pattern": pattern}, max_tokens=10**9)
    yield with_schema({"enum": [f"word number {i}" for i in range(5_000)]}, stream=True)
    yield with_schema(
        {"type": "array", "minItems": 10**6, "items": {"$ref": "#"}}, max_tokens=10**9, stream=True
    )
    yield GOOD_BODY | {
        "prompt": [[1] * 160] * 8,
        "max_tokens": 10**9,
        "repetition_penalty": 1e100,
        "temperature": 0,
    }
