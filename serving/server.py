"""A uvicorn server that finishes what it has accepted before it ends."""

import signal
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from thinker.serving.app import Service


class DrainingServer(uvicorn.Server):
    """On the first SIGINT or SIGTERM, refuses new requests and finishes the others; on the second, ends at once."""

    def __init__(self, app: ASGIApp, service: Service, log: Callable[[str], None]) -> None:
        """`log`: prints a line for the user."""
        options = {"lifespan": "off", "access_log": False, "log_config": None, "ws": "none"}
        # Clients keep idle connections for 5 s, as uvicorn does by default: they would meet closed ones.
        options["timeout_keep_alive"] = 75
        super().__init__(uvicorn.Config(app, **options))
        self._service, self._log = service, log

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for a signal."""
        if self._service.is_draining:
            signal.signal(sig, signal.SIG_DFL)  # neither requests nor threads can delay the end
            signal.raise_signal(sig)
        elif self._service.n_active:
            self._log(f"finishing {self._service.n_active} request(s); Ctrl-C again to end now")
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second. Returns whether to end."""
        return await super().on_tick(counter) or (
            self._service.is_draining and self._service.n_active == 0
        )
