"""The HTTP application: routes, limits and authorization."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
from collections.abc import Awaitable, Coroutine
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
from thinker.runtime.errors import did_you_mean
from thinker.serving.answers import Choice, envelope, usage
from thinker.serving.engine_thread import QueueFull, Submission
from thinker.serving.errors import ApiError, event, json_response
from thinker.serving.inspection import inspection_page
from thinker.serving.metrics import Metrics
from thinker.serving.models import ServedModel
from thinker.serving.protocol import ChatRequest, CompletionRequest, InspectRequest, parse

BODY_SECONDS = 30  # to send a request
OPEN_PATHS = ("/", "/health")  # without a key
Result = TypeVar("Result")


@dataclass
class Service:
    """What the handlers share."""

    models: dict[str, ServedModel]
    metrics: Metrics
    page: str  # of the playground
    api_key: str | None = None
    max_body: int = 1 << 20  # bytes
    hosts: frozenset[str] | None = (
        None  # names under which a browser may reach this server; None: any
    )
    is_draining: bool = False
    n_active: int = 0  # accepted requests without a complete response
    # One inspection at a time: each takes seconds of all cores.
    inspector: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "inspector")
    )

    def model(self, name: str) -> ServedModel:
        """The model of this name. Raises ApiError."""
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; available: {', '.join(self.models)}"
            raise ApiError(
                404, f"there is no model {name[:80]!r}{hint}", "model", "model_not_found"
            )
        return self.models[name]


def create_app(service: Service, cors_origins: list[str]) -> ASGIApp:
    """The application. `cors_origins`: web sites whose pages may call it."""

    async def playground(request: Request) -> Response:
        return HTMLResponse(service.page)

    async def health(request: Request) -> Response:
        status = "draining" if service.is_draining else "ok"
        if not all(model.engine.is_alive for model in service.models.values()):
            status = "failed"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        return json_response(
            {"object": "list", "data": [model.describe() for model in service.models.values()]}
        )

    async def one_model(request: Request) -> Response:
        return json_response(service.model(request.path_params["name"]).describe())

    async def vocabulary(request: Request) -> Response:
        model = service.model(request.query_params.get("model", ""))
        return await asyncio.to_thread(lambda: json_response(model.vocabulary()))

    async def inspect(request: Request) -> Response:
        body = parse(InspectRequest, await _body(request, service.max_body))
        model, loop = service.model(body.model), asyncio.get_running_loop()

        if await request.is_disconnected():  # it may have left while it was sending
            return Response(status_code=499)

        async def page() -> Response:
            return HTMLResponse(
                await loop.run_in_executor(service.inspector, inspection_page, model, body)
            )

        return await _while_connected(request.receive, page(), Response(status_code=499))

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
    middleware = [Middleware(Guard, service=service, paths=[route.path for route in routes])]
    if cors_origins:  # OpenAI's client for browsers sends headers of its own
        allowed = {"allow_origins": cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **allowed, expose_headers=["Retry-After"]))
    return Starlette(routes=routes, exception_handlers=HANDLERS, middleware=middleware)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow")
    reasons = {
        404: f"there is no {request.scope['path'][:80]} here; see /v1/models, /v1/completions, /v1/chat/completions",
        405: f"{request.method} is not allowed here; use {allowed}",
    }
    return ApiError(
        error.status_code, reasons.get(error.status_code, error.detail), headers=error.headers
    ).response()


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
        self.app, self.service, self.paths = app, service, paths

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
        try:
            await (self.app if refusal is None else refusal.response())(
                scope, receive, count_and_send
            )
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.service.metrics.requests.labels(path, statuses[0] if statuses else "none").inc()

    def _refusal(self, request: Request) -> ApiError | None:
        # Not request.url: older versions of Starlette read its path from the Host header, which the client chooses.
        service, path = self.service, request.scope["path"]
        host = (
            re.sub(r":\d*$", "", request.headers.get("host", "localhost")).strip("[]").lower()
        )  # without the port
        if service.hosts is not None and host not in service.hosts:
            return ApiError(
                403, f"this server does not answer to the name {host[:80]!r}; start it with --host"
            )
        if service.api_key is not None and path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode("latin-1"), service.api_key.encode())
            if scheme.lower() != "bearer" or not is_right:
                message = (
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY"
                )
                return ApiError(
                    401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
        if service.is_draining and request.method == "POST":
            return ApiError(
                503, "the server is shutting down; use another one", headers={"Retry-After": "5"}
            )
        is_json = (
            request.headers.get("content-type", "").split(";")[0].strip().lower()
            == "application/json"
        )
        if (
            request.method == "POST" and not is_json
        ):  # pages of other sites can send other types without permission
            return ApiError(415, "the body has to be JSON: send Content-Type: application/json")
        return None


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises ApiError if it is too long or takes too long."""

    async def read() -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise ApiError(
                    413, f"the body of the request has more than {limit} bytes; see --max-body"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise ApiError(
            408, f"the request did not arrive within {BODY_SECONDS} s; send it again"
        ) from None


async def _generate(
    service: Service, request: Request, kind: type[CompletionRequest | ChatRequest]
) -> Response:
    """Answer a request for completions, as one response or as a stream."""
    body = parse(kind, await _body(request, service.max_body))
    model = service.model(body.model)
    service.n_active += 1
    try:
        sequences = await asyncio.to_thread(model.sequences, body)
        choices = [Choice(sequence, body) for sequence in sequences]
        submission = model.engine.submit(sequences)
    except QueueFull as error:
        message = f"{model.name} is busy; try again in {error.retry_after} s"
        raise ApiError(
            429, message, code="queue_full", headers={"Retry-After": str(error.retry_after)}
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
        self._service, self._body, self._submission = service, body, submission
        self._choices, self._wrap = choices, envelope(body)
        self._sequences = [choice.sequence for choice in choices]
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
    def _end(self) -> Any:
        try:
            yield
        finally:
            self._submission.cancel()
            self._service.n_active -= 1

    async def _collect(self) -> Response:
        sampled: list[list[SampledToken]] = [[] for _ in self._sequences]
        async for progress in self._submission:
            if progress.error is not None:
                raise ApiError(500, str(progress.error))
            sampled[progress.sequence.index] += progress.sampled
        choices = [choice.whole(tokens) for choice, tokens in zip(self._choices, sampled)]
        return json_response(self._wrap(choices, usage(self._sequences, self._body.n)))

    async def _send_events(self, send: Send) -> None:
        async def send_event(content: object) -> None:
            await send({"type": "http.response.body", "body": event(content), "more_body": True})

        async for progress in self._submission:
            if progress.error is not None:
                await send_event(ApiError(500, str(progress.error)).content)
                break
            sequence = progress.sequence
            reason = sequence.completion.finish_reason if progress.has_ended else None
            piece = self._choices[sequence.index].piece(progress.text, progress.sampled, reason)
            if piece is not None:
                await send_event(self._wrap([piece]))
        else:
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                await send_event(self._wrap([], usage(self._sequences, self._body.n)))
            await send_event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(
    receive: Receive, work: Coroutine[Any, Any, Result], otherwise: Result
) -> Result:
    """The result of `work`, which is cancelled when the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[Awaitable[Any]] = [
        asyncio.ensure_future(work),
        asyncio.ensure_future(disconnected()),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else otherwise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
