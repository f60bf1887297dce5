"""Running the server: its address, its signals and what it saves."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from token_recycling.errors import TokenRecyclingError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, so that a port in use is found before the model is loaded.

    Raises:
        TokenRecyclingError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(0)  # else two servers could bind the same port before either listens
    except socket.gaierror as error:
        raise TokenRecyclingError(f"--host is {host}; there is no such address") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TokenRecyclingError(
                f"port {port} is in use; stop the other program or choose another with --port"
            ) from error
        raise TokenRecyclingError(f"cannot use {host}:{port}: {error.strerror}") from error
    return made


class SignalledServer(uvicorn.Server):
    """uvicorn, which ends normally after SIGTERM and SIGINT instead of raising them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals while serving: the first one drains, a second SIGINT does not."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {one: signal.signal(one, self._handle) for one in signals}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.handle_exit(number, frame)


def run(app: FastAPI, sock: socket.socket, *, drain_seconds: int, access_log: bool) -> None:
    """Serve until SIGTERM or SIGINT; then finish the answers in progress.

    Args:
        app: the application.
        sock: a bound socket.
        drain_seconds: after which answers in progress are ended.
        access_log: print a line per request.
    """
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        timeout_graceful_shutdown=drain_seconds,
        lifespan="on",
    )
    SignalledServer(config).run(sockets=[sock])
