"""The loop that decodes all requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Event
from time import monotonic

from transformers import LogitsProcessorList

from token_recycling.decoding.accept import FollowAcceptor
from token_recycling.decoding.metrics import Stats, Step
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.hf.call import prepare_call
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import TreeTarget
from token_recycling.recycler import TokenRecycling
from token_recycling.server.batch import ContinuousBatch, Row
from token_recycling.server.job import Ended, Failed, Job, LogprobRecorder, NewTokens
from token_recycling.server.metrics import Metrics
from token_recycling.server.prefixes import PrefixCaches, common
from token_recycling.server.queue import FairQueue
from token_recycling.server.scopes import MatrixScopes

logger = logging.getLogger(__name__)
# Most tokens of a batch; rows are padded to the longest one, and padding counts.
BATCH_TOKENS = 32768
TICK = 1.0  # seconds between calls of ``on_tick`` while idle


class QueueFullError(Exception):
    """The queue is full; ``seconds`` is a guess of when there will be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {seconds} s")
        self.seconds = seconds


class DrainingError(Exception):
    """The server is shutting down and takes no more requests."""


class AbortedError(Exception):
    """The client has gone while its prompt was being read."""


@dataclass(eq=False)
class Running(Row):
    """A row of the batch, and the job that it belongs to.

    Attributes:
        job: what was asked for.
        recorder: notes log probabilities, if asked for.
        sent: tokens reported.
    """

    job: Job
    recorder: LogprobRecorder | None
    sent: int = 0


class Engine:
    """Decodes jobs of other threads, as many at once as fit into the batch.

    The thread of ``run`` is the only one that uses the recycler. It should be the one that has
    loaded the model: OpenMP makes a team of workers per thread, and where the teams have more
    threads than the machine has cores, GCC's library lets all of them sleep between two parallel
    loops, which makes the steps of small models half as long again.
    Jobs join the batch and leave it between steps. While a long prompt is read, the other rows
    advance by one step after every chunk.
    """

    def __init__(
        self,
        recycler: TokenRecycling,
        metrics: Metrics,
        scopes: MatrixScopes,
        prefixes: PrefixCaches,
        *,
        most_rows: int,
        most_waiting: int,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """Create the engine.

        Args:
            recycler: used by nothing else.
            metrics: counts requests and tokens.
            scopes: what the requests share.
            prefixes: contexts of earlier requests.
            most_rows: requests decoded at once.
            most_waiting: requests in the queue, in addition; for more ``submit`` raises.
            on_tick: called between steps, and every second while idle.
        """
        self.recycler, self.metrics = recycler, metrics
        self._scopes, self._prefixes = scopes, prefixes
        trees = isinstance(recycler.target, TreeTarget)
        self._most_rows = most_rows if trees else 1
        self._most_waiting, self._on_tick = most_waiting, on_tick
        self._batch: ContinuousBatch[Running] = ContinuousBatch(
            recycler.target, recycler.draft_size, recycler.runs.graph_decoder()
        )
        self._changed = Condition()  # guards _waiting, _admitted, _draining and _seconds
        self._waiting: FairQueue[Job] = FairQueue()
        self._admitted = 0  # jobs taken from the queue that have not ended
        self._draining = False
        self._seconds = 1.0  # a request takes, on average
        self._ended = Event()
        self.alive = False  # True while ``run`` runs

    @property
    def most_jobs(self) -> int:
        """Jobs that are decoded or wait at once, at most."""
        return self._most_rows + self._most_waiting

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs that belong together: all or none.

        Raises:
            QueueFullError: there is no room.
            DrainingError: the server is shutting down.
        """
        with self._changed:
            if self._draining:
                raise DrainingError
            free = max(0, self._most_rows - self._admitted)
            if len(self._waiting) + len(jobs) > self._most_waiting + free:
                rounds = len(self._waiting) / self._most_rows
                raise QueueFullError(max(1, round(rounds * self._seconds)))
            for job in jobs:
                self._waiting.put(job.caller, job)
            self._count()
            self._changed.notify()

    def abort(self, job: Job) -> None:
        """End a job, if it has not ended."""
        job.aborted = True
        with self._changed:
            if self._waiting.remove(job):
                self._count()

    def stop(self) -> None:
        """Take no more jobs, and wait until ``run`` has finished those that were taken."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        if self.alive:
            self._ended.wait()

    def _count(self) -> None:
        self.metrics.waiting.set(len(self._waiting))
        self.metrics.running.set(self._admitted)

    def run(self) -> None:
        """Decode until ``stop`` is called; after a fault, fail the jobs that are left."""
        self.alive = True
        try:
            self._loop()
        finally:
            self.alive = False
            with self._changed:
                self._draining = True
                left = [*(one.job for one in self._batch.rows), *self._waiting]
            for job in left:
                job.emit(Failed("the server has stopped", refused=False))
            self._ended.set()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._batch.rows or self._draining):
                    self._changed.wait(TICK)
                    if not self._waiting:
                        self._batch.release()
                        break
                if self._draining and not (self._waiting or self._batch.rows):
                    return
            if self._is_idle():
                self._warm()
            if self._on_tick is not None:
                self._on_tick()
            while (job := self._next()) is not None:
                self._join(job)
            if self._batch.rows:
                self._step()

    def _is_idle(self) -> bool:
        return not (self._waiting or self._batch.rows or self._draining)

    def _warm(self) -> None:
        """Compute missing warm rows until a request arrives, for ``TICK`` seconds at most."""
        rows = self.recycler.warm_rows
        if rows is not None and not rows.complete:
            self.recycler.warm(TICK, stop=lambda: not self._is_idle())

    def _next(self) -> Job | None:
        """Take a job from the queue if it fits into the batch."""
        with self._changed:
            job = self._waiting.next()
            rows = self._batch.rows
            if job is None or len(rows) >= self._most_rows:
                return None
            longest = max([len(job.prompt), *(len(row.sequence.tokens) for row in rows)])
            if rows and longest * (len(rows) + 1) > BATCH_TOKENS:
                return None
            self._admitted += 1
            job = self._waiting.pop()
            self._count()
            return job

    def _join(self, job: Job) -> None:
        """Read a job's prompt and report its first token."""
        begun = monotonic()

        def between(read: int, total: int) -> None:
            if job.aborted:
                raise AbortedError
            if read < total and self._batch.rows:
                self._step()

        try:
            row = self._prepare(job)
            sequence = row.sequence
            prefix = self._prefix(self._scopes.owner(job.key), sequence.tokens)
            self.metrics.prefix_bytes.set(self._prefixes.nbytes)
            step = self._batch.join(row, prefix=prefix, on_progress=between)
        except AbortedError:
            self._forget(job)
            self.metrics.ended("abort", Stats(), 0.0)
            return
        except TokenRecyclingError as error:
            self._forget(job)
            self.metrics.ended("error", Stats(), 0.0)
            job.emit(Failed(str(error), refused=True))
            return
        except Exception as error:  # the model, or a processor of Transformers, may raise anything
            self._fail([job], error)
            return
        self._record(step, [row])
        now = monotonic()
        self.metrics.began(
            sequence.prompt_length, sequence.cached, begun - job.arrived, now - job.arrived
        )
        self._report()

    def _prefix(self, owner: str, tokens: list[int]) -> RecyclingCache | None:
        """Return keys and values of the longest known beginning of a prompt, or None.

        Kept texts and the rows of the batch are looked at. The last token must be read anyway.
        """
        own = tokens[:-1]
        key, length = self._prefixes.find(owner, own)
        best: Running | None = None
        for row in self._batch.rows:
            if self._scopes.owner(row.job.key) == owner:
                same = common(row.sequence.tokens[:-1], own)
                if same > length:
                    best, length = row, same
        if not length:
            return None
        if best is None:
            return self._prefixes.take(key, length)
        return self._batch.copy(best, length)

    def _prepare(self, job: Job) -> Running:
        """Return a job as a row that can join the batch."""
        recycler = self.recycler
        call = prepare_call(
            recycler.model,
            recycler.tokenizer,
            recycler.target,
            [job.prompt],
            job.options,
            job.processors,
            stream=True,
            special_tokens=job.special_tokens,
        )
        (sequence,), accept, recorder = call.sequences, call.accept, None
        if job.top_logprobs is not None:
            recorder = LogprobRecorder(job.top_logprobs)
            if isinstance(accept, FollowAcceptor):
                accept = FollowAcceptor(accept.processors, accept.sampler, recorder)
            else:
                accept = FollowAcceptor([LogitsProcessorList()], None, recorder)
        return Running(sequence, accept, self._scopes.drafter(job.key), job, recorder)

    def _step(self) -> None:
        """Advance all rows by one step, and report their tokens."""
        self._leave([one for one in self._batch.rows if one.job.aborted], "abort")
        if not self._batch.rows:
            return
        try:
            step = self._batch.step()
        except Exception as error:  # for example, the device is out of memory
            jobs = [one.job for one in self._batch.rows]
            self._batch.clear()
            self._fail(jobs, error)
            return
        self._record(step, self._batch.rows)
        self.metrics.stepped(step)
        self._report()

    def _record(self, step: Step, rows: list[Running]) -> None:
        for row, one in enumerate(rows):
            sequence = one.sequence
            read = sequence.prompt_length - sequence.cached
            for stats in (sequence.stats, self.recycler.stats):
                stats.add(step, row, prompt_tokens=read)

    def _report(self) -> None:
        """Report new tokens; let rows leave that have ended, or whose grammar has failed."""
        ended, lost = [], []
        for one in self._batch.rows:
            sequence, begin = one.sequence, one.sent
            new = sequence.new_tokens
            if len(new) == begin:
                continue
            if one.job.grammar is not None and one.job.grammar.problem is not None:
                lost.append(one)
                continue
            assert sequence.text is not None
            if not sequence.active:
                sequence.text.finish()
                ended.append(one)
            tokens = new[begin:]
            one.sent = len(new)
            # The last token of a step, and the first of an answer, are the target's own.
            drafted = [begin > 0 and at < len(new) - 1 for at in range(begin, len(new))]
            likely = None if one.recorder is None else one.recorder.take(tokens)
            pieces = sequence.text.pieces[begin:]
            one.job.emit(NewTokens(tokens, pieces, drafted, likely, sequence.cached))
        self._leave(ended)
        self._leave(lost, "error")
        for one in lost:
            assert one.job.grammar is not None
            assert one.job.grammar.problem is not None
            one.job.emit(Failed(one.job.grammar.problem, refused=True))

    def _leave(self, rows: list[Running], reason: str | None = None) -> None:
        """Let rows leave the batch, report their end, and keep what was read of them."""
        for one in rows:
            sequence = one.sequence
            owner = self._scopes.owner(one.job.key)
            if (context := self._batch.leave(one)) is not None:
                self._prefixes.keep(owner, sequence.tokens[:-1], context)
                self.metrics.prefix_bytes.set(self._prefixes.nbytes)
            self._forget(one.job)
            why = sequence.finish_reason or "abort"
            taken = monotonic() - one.job.arrived
            self.metrics.ended(
                reason or ("length" if why == "length" else "stop"), sequence.stats, taken
            )
            if reason is None:
                one.job.emit(Ended(why, sequence.stats))

    def _forget(self, job: Job) -> None:
        """Note that a job which was taken from the queue is done."""
        with self._changed:
            self._admitted -= 1
            self._seconds += 0.1 * (monotonic() - job.arrived - self._seconds)
            self._count()

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        """Report a fault of the server."""
        logger.error("a request failed", exc_info=error)
        for job in jobs:
            self._forget(job)
            self.metrics.ended("error", Stats(), 0.0)
            job.emit(Failed(f"{type(error).__name__}: {one_line(error, 200)}", refused=False))
