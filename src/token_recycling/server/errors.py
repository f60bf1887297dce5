"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from token_recycling.errors import printable

MOST_CHARACTERS = 500  # of a message; requests may bring megabytes to quote


class ApiError(Exception):
    """An answer with an HTTP status of 400 or above."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        closes: bool = False,
    ) -> None:
        """Describe the error.

        Args:
            message: one line.
            status: the HTTP status, from which OpenAI's ``type`` follows.
            param: the field at fault.
            code: OpenAI's ``code``.
            retry_after: seconds for the header Retry-After.
            closes: the connection cannot be used again: a body has not been read whole.
        """
        message = _cut(message)
        super().__init__(message)
        self.status, self.retry_after, self.closes = status, retry_after, closes
        kind = "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": "server_error" if status >= 500 else kind,
                "param": None if param is None else _cut(param),
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        """Return the error as a response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.closes:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def _cut(text: str) -> str:
    """Return ``text`` without what cannot be encoded, and not longer than a message may be."""
    short = printable(text[:MOST_CHARACTERS])
    return short if len(text) <= MOST_CHARACTERS else f"{short}…"


def add_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; the code is that of nginx

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path} here"
            if allowed := (error.headers or {}).get("Allow"):
                message += f"; use {', '.join(sorted(allowed.split(', ')))}"
        return ApiError(message, status=error.status_code).response()
