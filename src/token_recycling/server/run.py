"""Running the server: its threads and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from types import FrameType

import uvicorn
from fastapi import FastAPI

from token_recycling.server.connection import Connection
from token_recycling.server.engine import Engine

GRACE_SECONDS = 5  # for the last frames of answers that were ended


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return False for requests that were cancelled at the end: their traceback says nothing."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (kind is not None and issubclass(kind, asyncio.CancelledError))


def run(
    app: FastAPI,
    engine: Engine,
    sock: socket.socket,
    *,
    drain_seconds: int,
    access_log: bool,
    on_start: Callable[[], None],
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then finish the answers in progress.

    HTTP is served in a thread of its own, and requests are decoded in this one, the main thread
    (see ``Engine``).

    Args:
        app: the application of ``engine``.
        engine: decodes the requests.
        sock: a bound socket.
        drain_seconds: after which answers in progress are ended, with an error.
        access_log: print a line per request.
        on_start: called when signals end the server in this way.
    """
    config = uvicorn.Config(
        app,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        http=Connection,
        # The engine ends the answers before.
        timeout_graceful_shutdown=drain_seconds + GRACE_SECONDS,
        lifespan="off",
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    server = uvicorn.Server(config)

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
    try:
        on_start()
        engine.run()
    finally:
        server.should_exit = True
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
