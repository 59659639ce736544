"""The HTTP application: routes, limits and authorization."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinker.generation.sequence import SampledToken
from thinker.runtime.errors import RunError, UserError, did_you_mean
from thinker.serving.answers import Choice, envelope, usage
from thinker.serving.api_errors import ApiError, event, json_response
from thinker.serving.engine_thread import QueueFull, Submission
from thinker.serving.inspection import inspection_page
from thinker.serving.models import ServedModel
from thinker.serving.protocol import ChatRequest, CompletionRequest, InspectRequest, parse, refusal
from thinker.serving.server_metrics import Metrics

BODY_SECONDS = 30  # to send a request
EVENTS_PER_MESSAGE = 16  # of a stream, so that a slow client takes little memory
OPEN_PATHS = ("/", "/health")  # without a key
# No page of another site may show ours. The rest of the policy is in the page; this is not allowed
# there.
PAGE_HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'"}
Result = TypeVar("Result")


@dataclass
class Service:
    """What the handlers share."""

    models: dict[str, ServedModel]
    metrics: Metrics
    page: str  # of the playground
    api_key: str | None = None
    max_body: int = 1 << 20  # bytes
    # Names under which a browser may reach this server; None: any.
    hosts: frozenset[str] | None = None
    is_draining: bool = False
    n_active: int = 0  # accepted requests without a complete response
    # One inspection at a time: each takes seconds of all cores.
    inspector: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "inspector")
    )

    def model(self, name: str) -> ServedModel:
        """The model of this name. Raises ApiError."""
        if name in self.models:
            return self.models[name]
        hint = did_you_mean(name, self.models)
        if not hint:
            hint = f"; available: {', '.join(self.models)}"
        message = f"there is no model {name[:80]!r}{hint}"
        raise ApiError(404, message, "model", "model_not_found")


def create_app(service: Service, cors_origins: list[str]) -> ASGIApp:
    """The application. `cors_origins`: web sites whose pages may call it."""

    async def playground(request: Request) -> Response:
        return HTMLResponse(service.page, headers=PAGE_HEADERS)

    async def health(request: Request) -> Response:
        status = "draining" if service.is_draining else "ok"
        for model in service.models.values():
            if not model.engine.is_alive:
                status = "failed"
        # A load balancer reads the code alone.
        code = 200 if status == "ok" else 503
        return json_response({"status": status}, code)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        entries = [model.describe() for model in service.models.values()]
        return json_response({"object": "list", "data": entries})

    async def one_model(request: Request) -> Response:
        return json_response(service.model(request.path_params["name"]).describe())

    async def vocabulary(request: Request) -> Response:
        model = service.model(request.query_params.get("model", ""))
        # In another thread: a large vocabulary takes long enough to delay all streams.
        return await asyncio.to_thread(lambda: json_response(model.vocabulary()))

    async def inspect(request: Request) -> Response:
        content = await _body(request, service.max_body)
        body = await asyncio.to_thread(parse, InspectRequest, content)
        model = service.model(body.model)
        loop = asyncio.get_running_loop()

        if await request.is_disconnected():  # it may have left while it was sending
            return Response(status_code=499)

        async def make_page() -> Response:
            page = await loop.run_in_executor(service.inspector, inspection_page, model, body)
            return HTMLResponse(page, headers=PAGE_HEADERS)

        return await _while_connected(request.receive, make_page(), Response(status_code=499))

    async def completions(request: Request) -> Response:
        return await _generate(service, request, CompletionRequest)

    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, ChatRequest)

    routes = [
        Route("/", playground),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/vocabulary", vocabulary),
        Route("/inspect", inspect, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]
    paths = [route.path for route in routes]
    middleware = [Middleware(Guard, service=service, paths=paths)]
    if cors_origins:
        # Before the guard: a browser asks for permission without a key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],  # OpenAI's client for browsers sends headers of its own
            expose_headers=["Retry-After"],
        )
        middleware.insert(0, cors)
    return Starlette(routes=routes, exception_handlers=HANDLERS, middleware=middleware)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code == 404:
        path = request.scope["path"][:80]
        known = "/v1/models, /v1/completions, /v1/chat/completions"
        message = f"there is no {path} here; see {known}"
    elif error.status_code == 405:
        allowed = None
        if error.headers is not None:
            allowed = error.headers.get("Allow")
        message = f"{request.method} is not allowed here; use {allowed}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # which nobody reads, but the metrics count


async def _failure(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed; see its log").response()


HANDLERS = {
    ApiError: _api_error,
    HTTPException: _http_error,
    ClientDisconnect: _disconnected,
    Exception: _failure,
}


class Guard:
    """Checks a request before it is handled, and counts it."""

    def __init__(self, app: ASGIApp, service: Service, paths: list[str]) -> None:
        self.app = app
        self.service = service
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI defines it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        statuses = []

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        refusal = self._refusal(Request(scope))
        handler = self.app if refusal is None else refusal.response()
        try:
            await handler(scope, receive, count_and_send)
        except Exception:
            statuses.append(500)  # sent by Starlette, which wraps this class
            raise
        finally:
            # Clients choose paths, and each label of a metric takes memory for ever.
            path = scope["path"] if scope["path"] in self.paths else "other"
            status = statuses[0] if statuses else "none"
            self.service.metrics.requests.labels(path, status).inc()

    def _refusal(self, request: Request) -> ApiError | None:
        """Why a request is not handled, or None."""
        service = self.service
        # Not of request.url: older versions of Starlette read its path from the Host header, which
        # the client chooses.
        path = request.scope["path"]
        headers = request.headers
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that reads the other one would see another request behind this one.
            message = "the request has Content-Length and Transfer-Encoding; send only one"
            return ApiError(400, message, headers={"Connection": "close"})
        if service.hosts is not None:
            # Against DNS rebinding: a page of another site that gives its own name our address.
            host = _host(request)
            if host not in service.hosts:
                problem = f"this server does not answer to the name {host[:80]!r}"
                return ApiError(403, f"{problem}; see --allowed-host")
        needs_key = service.api_key is not None and path not in OPEN_PATHS
        if needs_key and not _has_key(request, service.api_key):
            return ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.method != "POST":
            return None
        if service.is_draining:
            return ApiError(
                503, "the server is shutting down; use another one", headers={"Retry-After": "5"}
            )
        # Pages of other sites can send other types without asking the browser for permission.
        content_type = request.headers.get("content-type", "").split(";")[0]
        if content_type.strip().lower() != "application/json":
            return ApiError(415, "the body has to be JSON: send Content-Type: application/json")
        return None


def _host(request: Request) -> str:
    """The host that a request names, without the port."""
    host = re.sub(r":\d*$", "", request.headers.get("host", "localhost"))
    return host.strip("[]").lower()


def _has_key(request: Request, api_key: str) -> bool:
    """Whether a request has the key, compared in constant time."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode())
    return scheme.lower() == "bearer" and is_right


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises ApiError if it is too long or takes too long."""

    async def read() -> bytes:
        chunks = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:  # not by Content-Length, which may be missing
                raise ApiError(
                    413, f"the body of the request has more than {limit} bytes; see --max-body"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        message = f"the request did not arrive within {BODY_SECONDS} s; send it again"
        raise ApiError(408, message) from None


def _read_request(
    service: Service, kind: type[CompletionRequest | ChatRequest], content: bytes
) -> tuple[ServedModel, CompletionRequest | ChatRequest, list[Choice]]:
    """The model that a body asks for, the request in it, and its choices. Raises ApiError."""
    body = parse(kind, content)
    model = service.model(body.model)
    return model, body, model.choices(body)


async def _generate(
    service: Service, request: Request, kind: type[CompletionRequest | ChatRequest]
) -> Response:
    """Answer a request for completions, as one response or as a stream."""
    content = await _body(request, service.max_body)
    # Counted from here to the end of the answer, which counts itself.
    service.n_active += 1
    try:
        # In another thread: long bodies take long to parse, and long prompts to encode.
        model, body, choices = await asyncio.to_thread(_read_request, service, kind, content)
        submission = model.engine.submit([choice.sequence for choice in choices])
    except QueueFull as error:
        seconds = error.retry_after
        raise ApiError(
            429,
            f"{model.name} is busy; try again in {seconds} s",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        ) from None
    finally:
        service.n_active -= 1
    answer = Answer(service, body, choices, submission)
    if body.stream:
        return answer
    return await answer.whole(request.receive)


class Answer(Response):
    """The answer to a request: a stream of events, or whole()."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        choices: list[Choice],
        submission: Submission,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._service = service
        self._body = body
        self._submission = submission
        self._choices = choices
        self._wrap = envelope(body)
        service.n_active += 1

    async def whole(self, receive: Receive) -> Response:
        """The response without a stream."""
        with self._end():
            return await _while_connected(receive, self._collect(), Response(status_code=499))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as ASGI defines it."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        with self._end():
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _while_connected(receive, self._send_events(send), None)

    @contextlib.contextmanager
    def _end(self) -> Iterator[None]:
        """Whatever happens, give up what is not read and count the request as answered."""
        try:
            yield
        finally:
            self._submission.cancel()
            self._service.n_active -= 1

    async def _collect(self) -> Response:
        sampled: list[list[SampledToken]] = [[] for _ in self._choices]
        async for progress in self._submission:
            if progress.error is not None:
                raise self._failure(progress.error)
            sampled[progress.sequence.index] += progress.sampled
        choices = [choice.whole(tokens) for choice, tokens in zip(self._choices, sampled)]
        tokens_used = usage(self._choices, self._body.n)
        return json_response(self._wrap(choices, tokens_used))

    def _failure(self, error: UserError | RunError) -> ApiError:
        """The error for a text that failed while it grew."""
        if isinstance(error, UserError):  # such as a schema that is too complex
            return refusal(error, self._body)
        return ApiError(500, str(error))

    async def _send_events(self, send: Send) -> None:
        async for contents in self._events():
            # One message for what a step added: a message per token would cost more time.
            for start in range(0, len(contents), EVENTS_PER_MESSAGE):
                body = b"".join(map(event, contents[start : start + EVENTS_PER_MESSAGE]))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[list[object]]:
        """The contents of the stream; an error is the last one, as the status was sent long ago."""
        openings = [choice.opening() for choice in self._choices]
        yield [self._wrap([opening]) for opening in openings if opening is not None]
        async for progress in self._submission:
            if progress.error is not None:
                yield [self._failure(progress.error).content]
                return
            sequence = progress.sequence
            reason = sequence.completion.finish_reason if progress.has_ended else None
            choice = self._choices[sequence.index]
            pieces = choice.pieces(progress.text, progress.sampled, reason)
            yield [self._wrap([piece]) for piece in pieces]
        if self._body.wants_usage:
            # As llama.cpp's server calls it. Clients cannot measure it: bursts arrive together.
            timings = {"predicted_per_second": self._submission.tokens_per_second}
            last = self._wrap([], usage(self._choices, self._body.n))
            yield [{**last, "timings": timings}]
        yield ["[DONE]"]


async def _while_connected(
    receive: Receive, work: Coroutine[Any, Any, Result], otherwise: Result
) -> Result:
    """The result of `work`, which is cancelled when the client disconnects."""

    async def disconnected() -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()

    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else otherwise
    finally:
        working.cancel()
        waiting.cancel()
        # Until both have ended: work may still use what its caller is about to give up.
        await asyncio.gather(working, waiting, return_exceptions=True)
