"""Jobs that wait for the engine: how many may, and in which order they are taken."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from token_recycling.server.errors import ApiError
from token_recycling.server.job import Job
from token_recycling.server.metrics import Metrics
from token_recycling.server.queue import FairQueue

SHUTTING_DOWN = "the server is shutting down"


class Admission:
    """The jobs that wait, and the number of those that are decoded; threads may share it."""

    def __init__(self, metrics: Metrics, most_rows: int, most_waiting: int) -> None:
        """Start without jobs.

        Args:
            metrics: counts those that wait and run.
            most_rows: jobs decoded at once.
            most_waiting: jobs that wait, in addition.
        """
        self._metrics, self._most_rows, self._most_waiting = metrics, most_rows, most_waiting
        self._changed = Condition()  # guards what is written below
        self._waiting: FairQueue[Job] = FairQueue()
        self._running = 0  # jobs that were taken and have not ended
        self._closed = False
        self._seconds = 1.0  # a request takes, on average

    def __len__(self) -> int:
        """Return how many jobs wait."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether no more jobs may be submitted; those that wait are still taken."""
        return self._closed

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs that belong together: all or none.

        If the queue is full, the caller with most jobs in it gives up its newest ones, as long as
        it still has as many as the caller of ``jobs``.

        Raises:
            ApiError: there is no room, or the server is shutting down.
        """
        with self._changed:
            if self._closed:
                raise ApiError(SHUTTING_DOWN, status=503, retry_after=1)
            free = max(0, self._most_rows - self._running)
            missing = len(self._waiting) + len(jobs) - self._most_waiting - free
            if missing > 0:
                after = max(1, round(len(self._waiting) / self._most_rows * self._seconds))
                given_up = self._waiting.make_room(jobs[0].caller, len(jobs), missing)
                full = f"the queue is full; try again in {after} s"
                if given_up is None:
                    raise _full(full, after)
                for job in given_up:
                    evicted = f"{full}: this request was evicted in favour of other clients"
                    job.emit(_full(evicted, after))
            for job in jobs:
                self._waiting.put(job.caller, job)
            self._count()
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait for a job, or the end, for at most ``seconds``."""
        with self._changed:
            if not (self._waiting or self._closed):
                self._changed.wait(seconds)

    def take(self, fits: Callable[[Job], bool]) -> Job | None:
        """Take the next job if it ``fits``; ``finished`` must be called when it has ended."""
        with self._changed:
            job = self._waiting.next()
            if job is None or not fits(job):
                return None
            self._running += 1
            job = self._waiting.pop()
            self._count()
            return job

    def finished(self, seconds: float) -> None:
        """Note that a job has ended, ``seconds`` after it arrived."""
        with self._changed:
            self._running -= 1
            self._seconds += 0.1 * (seconds - self._seconds)
            self._count()

    def remove(self, job: Job) -> None:
        """Remove a job that may be waiting."""
        with self._changed:
            if self._waiting.remove(job):
                self._count()

    def clear(self) -> list[Job]:
        """Remove and return all jobs that wait."""
        with self._changed:
            jobs = [self._waiting.pop() for _ in range(len(self._waiting))]
            self._count()
            return jobs

    def close(self) -> None:
        """Let no more jobs be submitted."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _count(self) -> None:
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.running.set(self._running)


def _full(message: str, after: int) -> ApiError:
    return ApiError(message, status=429, code="rate_limit_exceeded", retry_after=after)
