"""Connections: time limits for slow senders, and clients that leave after they have sent more."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for the headers of a request, from the connection's start or from its first byte.
HEADER_SECONDS = 15.0
MOST_AHEAD = 2**16  # bytes that a client may send before it has its answer


class Connection(H11Protocol):
    """HTTP/1.1 on one connection; a client that closes its direction has left."""

    _deadline: asyncio.TimerHandle | None = None

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

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that nobody needs any longer."""
        super().on_response_complete()
        answered = self.cycle.response_complete  # else it is a request that came before
        if answered and self.conn.their_state is h11.SEND_BODY:
            self._watch()
