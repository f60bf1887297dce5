"""Who sends a request: API keys, checked before a body is read."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from token_recycling.errors import printable
from token_recycling.server.errors import ApiError

API = "/v1/"  # requests for it need a key
LONG_KEY = 16  # characters of a key whose last four may be shown
LONGEST_ADDRESS = 64  # characters; a proxy may pass on anything as one


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        key: the API key; "" if none are required.
        name: with whom the request waits in turn, and what the log says of it: the address, or
            the key's number and the end of a long one.
    """

    key: str
    name: str


class Authentication:
    """Middleware that finds out who sends a request, before its body is read."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        """Wrap ``app``; requests for the API must have one of ``keys``, if there are any."""
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with its ``Caller`` in ``request.state.caller``."""
        if scope["type"] == "http" and scope["path"].startswith(API):
            try:
                caller = self._caller(HTTPConnection(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, request: HTTPConnection) -> Caller:
        """Return who sends a request.

        Raises:
            ApiError: a key is required, and the request has none or a wrong one.
        """
        host = request.client.host if request.client else ""
        if not self._keys:
            return Caller("", printable(host[:LONGEST_ADDRESS]))
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
        return Caller(key, f"key {matched + 1}{end}")
