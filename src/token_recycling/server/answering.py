"""A request's way through the engine: its jobs, their events, and a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from token_recycling.decoding.metrics import Stats
from token_recycling.server.engine import Engine
from token_recycling.server.errors import ApiError
from token_recycling.server.job import Answer, Ended, Event, Job, NewTokens

T = TypeVar("T")


class Answering:
    """The jobs of one request and their events.

    Attributes:
        left: jobs that have not ended.
    """

    def __init__(
        self, engine: Engine, answers: list[Answer], request: Request, n: int, logprobs: int | None
    ) -> None:
        """Queue a job for every answer.

        Args:
            engine: decodes them.
            answers: those of a prompt follow each other.
            request: says who sent it (see ``Authentication``).
            n: answers of each prompt.
            logprobs: log probabilities per token; None: none at all.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
        """
        self._engine = engine
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        key, caller = request.state.caller
        self._jobs = [
            Job(answer, key, caller, partial(self._emit, index), logprobs)
            for index, answer in enumerate(answers)
        ]
        self._prompt_tokens = sum(len(answer.prompt) for answer in answers[::n])
        self._cached, self._stats = 0, list[Stats]()
        self.left = len(self._jobs)
        if self.left > engine.most_jobs:
            raise ApiError(
                f"{self.left} choices are more than this server takes at once ({engine.most_jobs})"
            )
        engine.submit(self._jobs)

    def _emit(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def next(self) -> tuple[int, NewTokens | Ended]:
        """Return the next event and its answer.

        Raises:
            ApiError: the answer cannot be given.
        """
        index, event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Ended):
            self.left -= 1
            self._stats.append(event.stats)
        else:
            self._cached = max(self._cached, event.cached)
        return index, event

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` of the events so far; a prompt is counted once."""
        completion = sum(stats.new_tokens for stats in self._stats)
        accepted = sum(stats.accepted for stats in self._stats)
        drafted = sum(stats.drafted for stats in self._stats)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": min(self._cached, self._prompt_tokens)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def close(self) -> None:
        """End all jobs that have not ended."""
        for job in self._jobs:
            self._engine.abort(job)


async def or_gone(request: Request, awaited: Awaitable[T]) -> T:
    """Return the result of ``awaited``.

    Raises:
        ClientDisconnect: the client has closed the connection before.
    """

    async def closed() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result = asyncio.ensure_future(awaited)
    gone = asyncio.ensure_future(closed())
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        for task in (result, gone):
            task.cancel()
        await asyncio.gather(result, gone, return_exceptions=True)
