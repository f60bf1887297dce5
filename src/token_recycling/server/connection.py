"""Connections: limits for slow senders and small pieces, and clients that leave early."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for the headers of a request, from the connection's start or from its first byte.
HEADER_SECONDS = 15.0
MOST_AHEAD = 2**16  # bytes that a client may send before it has its answer
AT_ONCE = 2**14  # bytes that are parsed before other connections have their turn
# A body in more pieces than that must have so many bytes in each, on average: h11 takes 10 µs for
# every chunk.
MOST_PIECES, LEAST_BYTES = 1024, 64
ENDS = (b"connection", b"close")


class Connection(H11Protocol):
    """HTTP/1.1 on one connection; a client that closes its direction has left."""

    _deadline: asyncio.TimerHandle | None = None
    _pieces = _bytes = 0  # of the present request's body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; the headers of the first request must arrive in time."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own transports
            transport.max_size = AT_ONCE
        self.conn.next_event = self._next_event  # type: ignore[method-assign]
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

    def _next_event(self) -> Any:
        """Return h11's next event.

        Raises:
            RemoteProtocolError: the request is not HTTP, or its body comes in small pieces.
        """
        event = h11.Connection.next_event(self.conn)
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > MOST_PIECES and self._bytes < LEAST_BYTES * self._pieces:
                raise h11.RemoteProtocolError("the body comes in pieces that are too small")
        return event

    def handle_events(self) -> None:
        """Handle what h11 has parsed.

        After a request with two lengths the connection ends, as RFC 9112 (6.1) demands.
        """
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if {b"content-length", b"transfer-encoding"} <= names and ENDS not in self.headers:
            self.headers.append(ENDS)  # the same list as in the request's scope

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

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that nobody needs any longer."""
        super().on_response_complete()
        answered = self.cycle.response_complete  # else it is a request that came before
        if answered and self.conn.their_state is h11.SEND_BODY:
            self._watch()
