"""A uvicorn server that finishes what it has accepted before it ends, and drops clients that are
too slow."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from thinker.serving.app import Service

log = logging.getLogger("thinker.serving")

HEADER_SECONDS = 30  # to send the headers of a request
MAX_WAITING = 2048  # connections that the system keeps until they are accepted
NO_FILES = "socket.accept() out of system resource"  # what asyncio reports if it can open no file
SECONDS_BETWEEN_WARNINGS = 60


class TimedConnection(H11Protocol):
    """A connection that is closed if the headers of a request take too long.

    It has the time from the connection on, or from the first byte of a later request.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        self._start_or_stop_timer()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        super().data_received(data)
        self._start_or_stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        super().connection_lost(exc)
        self._stop_timer()

    def _start_or_stop_timer(self) -> None:
        is_handling = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None  # uvicorn has a timer for that
        if is_handling or is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """A server that drains when it is told to stop.

    On the first SIGINT or SIGTERM, it refuses new requests and finishes the others; on the second,
    it ends at once.
    """

    def __init__(self, app: ASGIApp, service: Service, log: Callable[[str], None]) -> None:
        """`log`: prints a line for the user."""
        options: dict[str, Any] = {
            "lifespan": "off",
            "access_log": False,
            "log_config": None,
            "ws": "none",
            # Not httptools and uvloop, which other packages may have installed: they answer wrong
            # requests and full tables of files in other ways.
            "http": TimedConnection,
            "loop": "asyncio",
            # asyncio accepts this many connections at once. Where it can open no file, it fails as
            # often, and tries again a second later for each failure: more each second, unless 1.
            "backlog": 1,
            # Clients keep idle connections for 5 s, and so does uvicorn by default: a client could
            # meet a connection that was just closed.
            "timeout_keep_alive": 75,
        }
        super().__init__(uvicorn.Config(app, **options))
        self._service = service
        self._log = log
        self._warned_at = -SECONDS_BETWEEN_WARNINGS  # of a lack of files

    async def startup(self, sockets: list[socket.socket]) -> None:
        """Called by uvicorn in its event loop."""
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)
        for listener in sockets:
            listener.listen(MAX_WAITING)  # again: uvicorn has called it with its backlog

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Called by asyncio for an error that nobody awaits."""
        if context["message"] != NO_FILES:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            reason = context["exception"].strerror
            log.warning("cannot accept connections (%s); raise the limit with ulimit -n", reason)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for a signal."""
        service = self._service
        is_second = service.is_draining
        service.is_draining = True  # before the log, in which a second signal may interrupt this
        if is_second:
            # The second signal. Neither requests nor threads can delay the default action.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif service.n_active:
            self._log(f"finishing {service.n_active} request(s); Ctrl-C again to end now")

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second. Returns whether to end."""
        wants_end = await super().on_tick(counter)
        has_drained = self._service.is_draining and self._service.n_active == 0
        return wants_end or has_drained
