"""Connections: time limits for slow senders, and clients that close only their own direction."""

from __future__ import annotations

import asyncio

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for the headers of a request, from the connection's start or from its first byte; and
# between two looks at whether a client that has closed its direction is still there.
HEADER_SECONDS, LOOK_SECONDS = 15.0, 0.5
MOST_AHEAD = 2**16  # bytes that a client may send before it has its answer


class Connection(H11Protocol):
    """HTTP/1.1 on one connection.

    A client may close its direction when it has sent a request (half-close), and gets its answer.
    One that has closed both looks the same until something is sent, so interim responses are sent,
    which clients must ignore (RFC 9110, 15.2): the system of a client that is gone refuses them.
    """

    _deadline: asyncio.TimerHandle | None = None
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the headers of the first request must arrive in time."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        self._watch()
        if self.conn.their_state is h11.DONE:  # what comes now belongs to a later request
            if len(self.conn.trailing_data[0]) > MOST_AHEAD:
                self.transport.close()
            else:  # uvicorn stops reading, and would not see that the client leaves
                self.flow.resume_reading()

    def _watch(self) -> None:
        """Set the deadline while headers are awaited, or a body that nobody needs any longer.

        More bytes do not move it.
        """
        answered = self.cycle is not None and self.cycle.response_complete
        state = self.conn.their_state
        if state is not h11.IDLE and not (answered and state is h11.SEND_BODY):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, to keep a connection on which an answer is due, until it has been sent."""
        cycle = self.cycle
        due = cycle is not None and not (cycle.response_complete or cycle.more_body)
        self._half_closed = due and self.conn.their_http_version != b"1.0"
        if self._half_closed:
            self._look()
        return self._half_closed

    def _look(self) -> None:
        """Send interim responses until the answer begins."""
        if self.transport.is_closing() or self.conn.our_state is not h11.SEND_RESPONSE:
            return
        event = h11.InformationalResponse(status_code=102, headers=[])
        self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(LOOK_SECONDS, self._look)

    def on_response_complete(self) -> None:
        """Close a connection on which no other request can come; else wait for one."""
        super().on_response_complete()
        if not self.cycle.response_complete:  # of a request that came before this answer
            return
        if self._half_closed:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            self._watch()


class AbsoluteForm:
    """Middleware for targets like ``http://host/v1/models``, which every server must accept.

    See RFC 9112, 3.2.2.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by the path of its target."""
        if scope["type"] == "http" and scope["path"].lower().startswith(("http://", "https://")):
            path = "/" + scope["path"].split("/", 3)[3] if scope["path"].count("/") > 2 else "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
