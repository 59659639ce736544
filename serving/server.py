"""A uvicorn server that finishes what it has accepted before it ends."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from thinker.serving.app import Service


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
            # Clients keep idle connections for 5 s, and so does uvicorn by default: a client could
            # meet a connection that was just closed.
            "timeout_keep_alive": 75,
        }
        super().__init__(uvicorn.Config(app, **options))
        self._service = service
        self._log = log

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for a signal."""
        service = self._service
        if service.is_draining:
            # The second signal. Neither requests nor threads can delay the default action.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif service.n_active:
            self._log(f"finishing {service.n_active} request(s); Ctrl-C again to end now")
        service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second. Returns whether to end."""
        wants_end = await super().on_tick(counter)
        has_drained = self._service.is_draining and self._service.n_active == 0
        return wants_end or has_drained
