"""Faults of the server: what the log says of them, and what a client gets."""

from __future__ import annotations

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skinny_kernels.errors import one_line
from token_recycling.errors import printable
from token_recycling.server.errors import ApiError

logger = logging.getLogger(__name__)
MOST_FRAMES = 20  # of a traceback
_seen: set[tuple[str, str, int | None]] = set()  # kinds of faults whose traceback was logged


def log_fault(what: str, error: BaseException) -> None:
    """Log a fault in one line, followed by its traceback if there was none like it before.

    Two faults are alike if they are of one type and were raised at one line of code.
    """
    line = printable(f"{what}: {type(error).__name__}: {one_line(error, 200)}")
    raised = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__, raised.filename, raised.lineno
    if kind not in _seen:
        _seen.add(kind)
        lines = traceback.format_exception(
            type(error), error, error.__traceback__, limit=-MOST_FRAMES
        )
        line = f"{line}\n{''.join(lines).rstrip()}"
    logger.error("%s", line)


class Faults:
    """Middleware that answers what the application does not expect with status 500."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; a response that has begun ends without its last part."""
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            log_fault(f"{scope['method']} {scope['path'][:200]}", error)
            if not begun:
                fault = ApiError("internal error", status=500)
                await fault.response()(scope, receive, send)
