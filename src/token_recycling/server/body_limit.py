"""Limits for the size of request bodies, and for the time that they take to arrive."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_recycling.server.errors import ApiError

MOST_BYTES, MOST_SECONDS = 4 * 2**20, 60.0


class _BodyTooLargeError(ApiError):
    """A body of more than ``MOST_BYTES``."""

    def __init__(self, *, closes: bool = False) -> None:
        super().__init__(
            f"the request is larger than {MOST_BYTES // 2**20} MiB",
            status=413,
            code="request_too_large",
            closes=closes,
        )


class _BodyTooSlowError(ApiError):
    """A body that took more than ``MOST_SECONDS``."""

    def __init__(self) -> None:
        super().__init__(
            f"the request's body did not arrive within {MOST_SECONDS:g} s",
            status=408,
            code="request_timeout",
            closes=True,
        )


class BodyLimit:
    """Middleware that refuses large and slow bodies before they are read whole."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; a body that turns out too large or slow raises where it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > MOST_BYTES:
                await _BodyTooLargeError(closes=True).response()(scope, receive, send)
                return
        read, complete = 0, False
        deadline = asyncio.get_running_loop().time() + MOST_SECONDS

        async def limited() -> Message:
            nonlocal read, complete
            if complete:  # what comes now is that the client has gone
                return await receive()
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), remaining)
            except asyncio.TimeoutError:
                raise _BodyTooSlowError from None
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if read > MOST_BYTES:
                raise _BodyTooLargeError
            return message

        await self._app(scope, limited, send)
