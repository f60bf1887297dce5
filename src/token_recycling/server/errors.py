"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from token_recycling.errors import printable


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
    ) -> None:
        """Describe the error.

        Args:
            message: one line.
            status: the HTTP status.
            kind: OpenAI's ``type``.
            param: the field at fault.
            code: OpenAI's ``code``.
            retry_after: seconds for the header Retry-After.
        """
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
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
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)
