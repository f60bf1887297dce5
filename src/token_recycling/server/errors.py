"""Errors in OpenAI's shape, whatever raised them."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from token_recycling.errors import printable

# Pydantic's problems with a body that is no object, its word for an object, and how it names the
# types of a union in the place of a problem.
NO_OBJECT = ("missing", "model_attributes_type", "model_type", "dict_type")
JARGON = "a valid dictionary or object to extract fields from"
UNION = re.compile(r"str|NamedTool|(list|literal)\[.*\]")


class ApiError(Exception):
    """An answer with an HTTP status of 400 or above."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        closes: bool = False,
    ) -> None:
        """Describe the error.

        Args:
            message: one line.
            status: the HTTP status.
            kind: OpenAI's ``type``.
            param: the field at fault.
            code: OpenAI's ``code``.
            retry_after: seconds for the header Retry-After.
            closes: the connection cannot be used again: a body has not been read whole.
        """
        super().__init__(message)
        self.status, self.retry_after, self.closes = status, retry_after, closes
        self.body: dict[str, Any] = {
            "error": {
                # A message may quote characters that cannot be encoded.
                "message": printable(message),
                "type": kind,
                "param": param,
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


class ClientGoneError(Exception):
    """The client has closed the connection."""


def add_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; the code is that of nginx

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # raised where FastAPI reads the body
            return error.__cause__.response()
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path} here"
            if allowed := (error.headers or {}).get("Allow"):
                message += f"; use {', '.join(sorted(allowed.split(', ')))}"
        elif error.status_code == 400:
            return ApiError("the body is not valid JSON", code="invalid_json").response()
        return ApiError(message, status=error.status_code).response()

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return ApiError("internal error", status=500, kind="server_error").response()


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the first problem of a body in OpenAI's shape."""
    # Where several types are possible, the deepest problem is that of the one that was meant.
    problem: dict[str, Any] = dict(max(error.errors(), key=lambda entry: len(entry["loc"])))
    parts = [str(part) for part in problem["loc"] if part != "body"]
    where = [part for part in parts if not UNION.fullmatch(part)]
    param = ".".join(where) or None
    kind, message = problem["type"], str(problem["msg"])
    if kind == "json_invalid":
        return ApiError("the body is not valid JSON", code="invalid_json")
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        param = getattr(problem["ctx"]["error"], "field", param)
    elif not parts and kind in NO_OBJECT:  # no body, another type of content, or a list
        message = "send a JSON object, with Content-Type: application/json"
    elif kind == "extra_forbidden":
        message = f"unrecognized request argument: {param}"
    elif kind == "missing":
        message = f"{param} is missing"
    elif param:
        message = f"{param}: {message[:1].lower()}{message[1:]}".replace(JARGON, "an object")
    return ApiError(message, param=param)
