"""A limit for the size of request bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_recycling.server.errors import ApiError

MOST_BYTES = 4 * 2**20


class BodyTooLargeError(ApiError):
    """A body of more than ``MOST_BYTES``."""

    def __init__(self) -> None:
        super().__init__(
            f"the request is larger than {MOST_BYTES // 2**20} MiB",
            status=413,
            code="request_too_large",
        )


class BodyLimit:
    """Middleware that refuses large bodies before they are read whole."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; a body that turns out too large raises where it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > MOST_BYTES:
                response = BodyTooLargeError().response()
                # The rest of the body is not read, so the connection cannot be used again.
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BYTES:
                raise BodyTooLargeError
            return message

        await self._app(scope, limited, send)
