"""A request's way through the engine: its jobs, their events, and a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from fastapi import Request

from token_recycling.server.admission import DrainingError, QueueFullError
from token_recycling.server.authentication import Caller
from token_recycling.server.engine import SHUTTING_DOWN, Engine
from token_recycling.server.errors import ApiError, ClientGoneError
from token_recycling.server.job import Ended, Event, Failed, Job, NewTokens
from token_recycling.server.prompts import Answer

T = TypeVar("T")


class Answering:
    """The jobs of one request and their events."""

    def __init__(
        self, engine: Engine, answers: list[Answer], caller: Caller, top_logprobs: int | None
    ) -> None:
        """Queue a job for every answer.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
        """
        self._engine = engine
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs = [
            Job(
                answer.prompt,
                answer.options,
                answer.processors,
                key=caller.key,
                caller=caller.name,
                emit=self._emitter(index),
                grammar=answer.grammar,
                special_tokens=answer.parser is not None and answer.parser.special_tokens,
                top_logprobs=top_logprobs,
            )
            for index, answer in enumerate(answers)
        ]
        self.left = len(self._jobs)  # jobs that have not ended
        if self.left > engine.most_jobs:
            raise ApiError(
                f"{self.left} choices are more than this server takes at once ({engine.most_jobs})"
            )
        try:
            engine.submit(self._jobs)
        except QueueFullError as error:
            raise _error(Failed(str(error), 429, error.seconds)) from error
        except DrainingError as error:
            raise _error(Failed(SHUTTING_DOWN, 503, 1)) from error

    def _emitter(self, index: int) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return emit

    async def next(self) -> tuple[int, NewTokens | Ended]:
        """Return the next event and its answer.

        Raises:
            ApiError: the answer cannot be given.
        """
        index, event = await self._events.get()
        if isinstance(event, Failed):
            raise _error(event)
        self.left -= isinstance(event, Ended)
        return index, event

    def close(self) -> None:
        """End all jobs that have not ended."""
        for job in self._jobs:
            self._engine.abort(job)


def _error(failed: Failed) -> ApiError:
    """Return the error that a client gets."""
    if failed.status == 400:
        return ApiError(failed.message)
    if failed.status == 429:
        return ApiError(
            failed.message,
            status=429,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=failed.retry_after,
        )
    status, after = failed.status, failed.retry_after
    return ApiError(failed.message, status=status, kind="server_error", retry_after=after)


async def or_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Return the result of ``awaited``.

    Raises:
        ClientGoneError: the client has closed the connection before.
    """

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(closed())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientGoneError
        return result.result()
    finally:
        for task in (result, gone):
            task.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)
