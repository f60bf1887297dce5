"""What is checked before a request's body is read whole: API keys, and the body's size and time."""

from __future__ import annotations

import asyncio
import secrets

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token_recycling.errors import printable
from token_recycling.server.errors import ApiError

API = "/v1/"  # requests for it need a key
LONG_KEY = 16  # characters of a key whose last four may be shown
LONGEST_ADDRESS = 64  # characters; a proxy may pass on anything as one
MOST_BYTES, MOST_SECONDS = 4 * 2**20, 60.0  # of a body


class Authentication:
    """Middleware that finds out who sends a request.

    ``request.state.caller`` is then the API key, "" if none are required, and the name with which
    the request waits in turn and is logged: the address, or the key's number and the end of a long
    one.
    """

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        """Wrap ``app``; requests for the API must have one of ``keys``, if there are any."""
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and scope["path"].startswith(API):
            try:
                scope.setdefault("state", {})["caller"] = self._caller(HTTPConnection(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, request: HTTPConnection) -> tuple[str, str]:
        if not self._keys:
            host = request.client.host if request.client else ""
            return "", printable(host[:LONGEST_ADDRESS])
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        matched = None
        for number, key in enumerate(self._keys):  # all of them, so that the time tells nothing
            if secrets.compare_digest(token.strip().encode(), key.encode()):
                matched = number
        if scheme.lower() != "bearer" or matched is None:
            problem = "this server requires an API key: send Authorization: Bearer KEY"
            if scheme.lower() == "bearer" and token.strip():
                problem = "wrong API key"
            raise ApiError(problem, status=401, code="invalid_api_key")
        key = self._keys[matched]
        end = f" …{key[-4:]}" if len(key) >= LONG_KEY else ""
        return key, f"key {matched + 1}{end}"


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
                await _too_large(closes=True).response()(scope, receive, send)
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
                slow = f"the request's body did not arrive within {MOST_SECONDS:g} s"
                raise ApiError(slow, status=408, code="request_timeout", closes=True) from None
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if read > MOST_BYTES:
                raise _too_large(closes=False)
            return message

        await self._app(scope, limited, send)


def _too_large(*, closes: bool) -> ApiError:
    message = f"the request is larger than {MOST_BYTES // 2**20} MiB"
    return ApiError(message, status=413, code="request_too_large", closes=closes)
