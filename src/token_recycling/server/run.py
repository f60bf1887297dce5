"""Running the server: its threads and signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from types import FrameType

import uvicorn
from fastapi import FastAPI

from token_recycling.errors import printable
from token_recycling.server.connection import Connection
from token_recycling.server.engine import Engine
from token_recycling.server.errors import MOST_CHARACTERS

GRACE_SECONDS = 1.0  # for the last frames of answers that were ended


class _Server(uvicorn.Server):
    """Closes the connections that are left some time after the end of answers."""

    def __init__(self, config: uvicorn.Config, seconds: float) -> None:
        """Close them ``seconds`` after the server began to shut down."""
        super().__init__(config)
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the answers in progress; clients that do not read them are not waited for."""
        asyncio.get_running_loop().call_later(self._seconds, self._end_connections)
        await super().shutdown(sockets)

    def _end_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _says_something(record: logging.LogRecord) -> bool:
    """Return False for what uvicorn logs of requests that were cancelled, or logged by us."""
    kind = record.exc_info[0] if record.exc_info else None
    cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
    return not cancelled and "without completing response" not in str(record.msg)


def _printed(record: logging.LogRecord) -> bool:
    """Escape what clients have written into a line of the access log."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(value[:MOST_CHARACTERS]) if isinstance(value, str) else value
            for value in record.args
        )
    return True


def http_server(
    app: FastAPI,
    *,
    drain_seconds: int,
    access_log: bool = False,
    trusted_proxies: Sequence[str] = (),
) -> uvicorn.Server:
    """Return the server of ``app``, for ``run``.

    Args:
        app: the application.
        drain_seconds: after which connections are closed, once the server shuts down.
        access_log: print a line per request.
        trusted_proxies: addresses or networks whose X-Forwarded-For is believed.
    """
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        http=Connection,
        lifespan="off",
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
    )
    logging.getLogger("uvicorn.error").addFilter(_says_something)
    logging.getLogger("uvicorn.access").addFilter(_printed)
    return _Server(config, drain_seconds + GRACE_SECONDS)


def run(
    server: uvicorn.Server,
    engine: Engine,
    sock: socket.socket,
    *,
    drain_seconds: int,
    on_start: Callable[[], None],
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then finish the answers in progress.

    HTTP is served in a thread of its own, and requests are decoded in this one, the main thread
    (see ``Engine``).

    Args:
        server: serves the application of ``engine``.
        engine: decodes the requests.
        sock: a bound socket.
        drain_seconds: after which answers in progress are ended, with an error.
        on_start: called when signals end the server in this way.
    """

    def serve() -> None:
        try:
            server.run(sockets=[sock])
        finally:
            engine.stop()  # its jobs have ended, or their requests are cancelled

    def end(number: int, frame: FrameType | None) -> None:
        first = not server.should_exit
        server.handle_exit(number, frame)  # the first signal drains; a second SIGINT does not wait
        if first:
            engine.end_answers_in(drain_seconds)
            line = (
                f"finishing answers in progress, for up to {drain_seconds} s; "
                "press Ctrl-C again to stop at once"
            )
            with suppress(OSError):  # the terminal may have been closed
                os.write(2, f"{line}\n".encode())  # print must not be used in a signal handler

    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in signals}
    thread = Thread(target=serve, name="http")
    thread.start()
    # What lives until the end need not be looked at whenever a request has made many objects: a
    # full collection of garbage took 0.3 s, in which nothing else ran.
    gc.collect()
    gc.freeze()
    try:
        on_start()
        engine.run()
    finally:
        server.should_exit = True
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
