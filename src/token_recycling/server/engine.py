"""The loop that decodes all requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from threading import Event
from time import monotonic

from transformers import LogitsProcessorList

from skinny_kernels.errors import one_line
from token_recycling.decoding.accept import FollowAcceptor
from token_recycling.decoding.metrics import Stats, Step
from token_recycling.decoding.slowness import Reminder, why_slow
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.size.base import FixedSize
from token_recycling.errors import TokenRecyclingError
from token_recycling.graph.pool import MOST_ROWS, padded_rows
from token_recycling.hf.call import prepare_call
from token_recycling.hf.serve import warn_plain
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import TreeTarget
from token_recycling.recycler import TokenRecycling
from token_recycling.server.admission import SHUTTING_DOWN, Admission
from token_recycling.server.batch import ContinuousBatch, Row
from token_recycling.server.errors import ApiError
from token_recycling.server.faults import log_fault
from token_recycling.server.job import Ended, Job, LogprobRecorder, NewTokens
from token_recycling.server.metrics import Metrics
from token_recycling.server.prefixes import PrefixCaches
from token_recycling.server.scopes import MatrixScopes
from token_recycling.util.memory import give_back
from token_recycling.util.tokens import common

logger = logging.getLogger(__name__)
# Most tokens of a batch; rows are padded to the longest one, and padding counts. A row joins if
# each can grow by ``ROOM`` tokens; when they have, the newest rows pause.
BATCH_TOKENS, ROOM = 32768, 128
JOIN_SECONDS = 0.1  # in which prompts are read one after another; then the others have a step
TICK = 1.0  # seconds between calls of ``on_tick`` while idle


class _AbortedError(Exception):
    """The client has gone before its prompt was read, or the server is shutting down."""


@dataclass(eq=False)
class _Running(Row):
    """A row of the batch, and the job that it belongs to.

    Attributes:
        job: what was asked for.
        recorder: notes log probabilities, if asked for.
        sent: tokens reported.
        cached: prompt tokens that were not read, when it joined for the first time.
    """

    job: Job
    recorder: LogprobRecorder | None
    sent: int = 0
    cached: int = 0


class Engine:
    """Decodes jobs of other threads, as many at once as fit into the batch.

    The thread of ``run`` is the only one that uses the recycler. It should be the one that has
    loaded the model: OpenMP makes a team of workers per thread, and where the teams have more
    threads than the machine has cores, GCC's library lets all of them sleep between two parallel
    loops, which makes the steps of small models half as long again.
    Jobs join the batch and leave it between steps. While a long prompt is read, the other rows
    advance by one step after every chunk: ``_join`` calls ``_step``, in which rows may leave, pause
    or fail. The row whose prompt is read is not in the batch yet.

    Attributes:
        most_jobs: jobs that are decoded or wait at once, at most.
        alive: True while ``run`` runs.
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
        self._plain = not isinstance(recycler.target, TreeTarget)
        self._most_rows = 1 if self._plain else most_rows
        self._admission = Admission(metrics, self._most_rows, most_waiting)
        self._on_tick, self._reminder = on_tick, Reminder()
        self.most_jobs = self._most_rows + most_waiting
        self._adoptions = recycler.target.adoptions
        most = padded_rows(min(self._most_rows, MOST_ROWS))
        recycler.warm(1 << power for power in range(most.bit_length()))
        self._batch = self._new_batch()
        self._paused: deque[_Running] = deque()  # rows that left the full batch, the oldest first
        self._deadline = inf  # ``monotonic()`` seconds at which answers in progress are ended
        self._ended = Event()
        self.alive = False  # True while ``run`` runs

    def _new_batch(self) -> ContinuousBatch[_Running]:
        """Return a batch without rows, which are decoded without trees if ``_plain`` is set."""
        recycler = self.recycler
        if self._plain and isinstance(recycler.target, TreeTarget):
            target = PlainTarget(recycler.model, recycler.target.lm_head)
            return ContinuousBatch(target, FixedSize())
        graph = recycler.session.graph_decoder()
        return ContinuousBatch(recycler.target, recycler.draft_size, graph)

    def _follow_model(self) -> None:
        """Adopt a model that has changed: before a row joins.

        Raises:
            TokenRecyclingError: it cannot verify trees any more, and the recycler is strict.
        """
        target = self.recycler.target
        if not isinstance(target, TreeTarget):
            return
        reason = self.recycler.check_model()
        if reason is not None:
            warn_plain(self.recycler, reason)
        if (target.adoptions, reason is not None) == (self._adoptions, self._plain):
            return
        self._adoptions, self._plain = target.adoptions, reason is not None
        self._prefixes.clear()
        for row in self._take_all():
            failed = ApiError("the model has changed while it answered", status=500)
            self._finish(row.job, "error", failed, row.sequence.stats)
        self._batch = self._new_batch()

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs that belong together (see ``Admission.submit``)."""
        self._admission.submit(jobs)

    def abort(self, job: Job) -> None:
        """End a job, if it has not ended."""
        job.aborted = True
        self._admission.remove(job)

    def end_answers_in(self, seconds: float) -> None:
        """End all answers with an error in ``seconds``; may be called in a signal handler."""
        self._deadline = monotonic() + seconds

    def stop(self) -> None:
        """Let no more jobs be submitted, and wait until ``run`` has finished the others."""
        self._admission.close()
        if self.alive:
            self._ended.wait()

    def run(self) -> None:
        """Decode until ``stop`` is called; after a fault, fail the jobs that are left."""
        self.alive = True
        try:
            self._loop()
        finally:
            self.alive = False
            self._admission.close()
            rows = (*self._batch.rows, *self._paused)
            for job in (*(row.job for row in rows), *self._admission.clear()):
                job.emit(ApiError("the server has stopped", status=500))
            self._ended.set()

    def _loop(self) -> None:
        worked = False
        while not self._admission.closed or self._has_work:
            if not self._has_work:
                self._admission.wait(TICK)
                if not self._admission:
                    self._batch.release()
                    if worked:
                        give_back()
            worked = self._has_work
            if self._on_tick is not None:
                self._on_tick()
            while self._paused and self._fits(self._paused[0].sequence.tokens):
                row = self._paused.popleft()
                self._join(row.job, row)
            until = monotonic() + JOIN_SECONDS
            while monotonic() < until and (job := self._admission.take(self._may_join)) is not None:
                self._join(job)
            if self._batch.rows:
                self._step()

    @property
    def _has_work(self) -> bool:
        return bool(self._admission or self._batch.rows or self._paused)

    def _may_join(self, job: Job) -> bool:
        """Return whether a job may join the batch now; rows that paused come first."""
        return not self._paused and self._fits(job.answer.prompt)

    def _fits(self, tokens: list[int]) -> bool:
        """Return whether a row of these tokens may join the batch."""
        rows = self._batch.rows
        longest = max([len(tokens), *(len(row.sequence.tokens) for row in rows)])
        within = (longest + ROOM) * (len(rows) + 1) <= BATCH_TOKENS
        return len(rows) < (1 if self._plain else self._most_rows) and (within or not rows)

    def _pause(self) -> None:
        """Take the newest rows out of a batch that has grown too large; they join again later.

        Those whose clients have gone do not.
        """
        for row in [row for row in self._paused if row.job.aborted]:
            self._paused.remove(row)
            self._finish(row.job, "abort", stats=row.sequence.stats)
        while len(rows := self._batch.rows) > 1:
            longest = max(len(row.sequence.tokens) for row in rows)
            if longest * len(rows) <= BATCH_TOKENS:
                return
            newest = max(rows, key=lambda row: row.job.arrived)
            self._remove(newest)
            self._paused.appendleft(newest)

    def _join(self, job: Job, row: _Running | None = None) -> None:
        """Let a job, or a row that has paused, join the batch; report its next token."""

        def between(read: int, total: int) -> None:
            if job.aborted or monotonic() > self._deadline:
                raise _AbortedError
            if read < total and self._batch.rows:
                self._step()

        try:
            row = row or self._prepare(job)
            begun, sequence = monotonic(), row.sequence
            if job.aborted:
                raise _AbortedError
            self._follow_model()
            if self._plain:
                row.drafter = NoDrafter()
            prefix = self._prefix(self._scopes.owner(job.key), sequence.tokens)
            self.metrics.prefix_bytes.set(self._prefixes.nbytes)
            step = self._batch.join(row, prefix=prefix, on_progress=between)
        except _AbortedError:
            shutting_down = ApiError(SHUTTING_DOWN, status=503)
            self._finish(job, "abort", None if job.aborted else shutting_down)
            return
        except TokenRecyclingError as error:
            self._finish(job, "error", ApiError(str(error)))
            return
        except Exception as error:  # the model, or a processor of Transformers, may raise anything
            self._fail([job], error)
            return
        self._record(step, [row])
        if not row.sent:
            row.cached, now = sequence.cached, monotonic()
            self.metrics.began(
                sequence.prompt_length, sequence.cached, begun - job.arrived, now - job.arrived
            )
        self._report()

    def _prefix(self, owner: str, tokens: list[int]) -> RecyclingCache | None:
        """Return keys and values of the longest known beginning of a prompt, or None.

        Kept texts and the rows of the batch are looked at. The last token must be read anyway.
        """
        if not self._prefixes.limit:
            return None
        prefix = tokens[:-1]
        key, length = self._prefixes.find(owner, prefix)
        best: _Running | None = None
        for row in self._batch.rows:
            if self._scopes.owner(row.job.key) == owner:
                same = common(row.sequence.tokens[:-1], prefix)
                if same > length:
                    best, length = row, same
        if not length:
            return None
        if best is None:
            return self._prefixes.take(key, length)
        return self._batch.copy(best, length)

    def _prepare(self, job: Job) -> _Running:
        """Return a job as a row that can join the batch."""
        recycler, answer = self.recycler, job.answer
        call = prepare_call(
            recycler.model,
            recycler.tokenizer,
            recycler.target,
            [answer.prompt],
            answer.options,
            answer.processors,
            stream=True,
            special_tokens=answer.parser is not None and answer.parser.special_tokens,
        )
        (sequence,), accept, recorder = call.sequences, call.accept, None
        if job.top_logprobs is not None:
            recorder = LogprobRecorder(job.top_logprobs)
            if isinstance(accept, FollowAcceptor):
                accept = FollowAcceptor(accept.processors, accept.sampler, recorder)
            else:
                accept = FollowAcceptor([LogitsProcessorList()], None, recorder)
        return _Running(sequence, accept, self._scopes.drafter(job.key), job, recorder)

    def _end_all(self) -> None:
        """End all answers with an error."""
        waiting = self._admission.clear()
        for row in self._take_all():
            self._finish(row.job, "abort", ApiError(SHUTTING_DOWN, status=503), row.sequence.stats)
        for job in waiting:
            job.emit(ApiError(SHUTTING_DOWN, status=503))

    def _take_all(self) -> list[_Running]:
        """Remove and return all rows."""
        rows = [*self._batch.rows, *self._paused]
        self._batch.clear()
        self._paused.clear()
        return rows

    def _step(self) -> None:
        """Advance all rows by one step, and report their tokens."""
        if monotonic() > self._deadline:
            self._end_all()
        for row in [row for row in self._batch.rows if row.job.aborted]:
            self._leave(row, "abort")
        self._pause()
        if not self._batch.rows:
            return
        try:
            step = self._batch.step()
        except Exception as error:  # for example, the device is out of memory
            jobs = [row.job for row in self._batch.rows]
            self._batch.clear()
            self._fail(jobs, error)
            return
        self._record(step, self._batch.rows)
        self.metrics.stepped(step)
        self._report()

    def _record(self, step: Step, rows: list[_Running]) -> None:
        for index, row in enumerate(rows):
            sequence = row.sequence
            read = 0 if row.sent else sequence.prompt_length - sequence.cached
            for stats in (sequence.stats, self.recycler.stats):
                stats.add(step, index, prompt_tokens=read)

    def _report(self) -> None:
        """Report new tokens; let rows leave that have ended, or whose grammar has failed."""
        ended: list[tuple[_Running, str, Ended | ApiError]] = []
        lost: list[tuple[_Running, str, Ended | ApiError]] = []
        for row in self._batch.rows:
            sequence, begin, grammar = row.sequence, row.sent, row.job.answer.grammar
            new = sequence.new_tokens
            if len(new) == begin:
                continue
            if grammar is not None and grammar.problem is not None:
                lost.append((row, "error", ApiError(grammar.problem)))
                continue
            assert sequence.text is not None
            if not sequence.active:
                sequence.text.finish()
                reason = sequence.finish_reason or "stop"
                counted = "length" if reason == "length" else "stop"
                ended.append((row, counted, Ended(reason, sequence.stats)))
            tokens = new[begin:]
            row.sent = len(new)
            # The last token of a step, and the first of an answer, are the target's own.
            drafted = [begin > 0 and at < len(new) - 1 for at in range(begin, len(new))]
            logprobs = None if row.recorder is None else row.recorder.take(tokens)
            pieces = sequence.text.pieces[begin:]
            row.job.emit(NewTokens(tokens, pieces, drafted, logprobs, row.cached))
        for row, reason, event in ended + lost:
            self._leave(row, reason, event)

    def _leave(self, row: _Running, reason: str, event: Ended | ApiError | None = None) -> None:
        """Let a row leave the batch, report its end, and keep what was read of it."""
        self._remove(row)
        self._finish(row.job, reason, event, row.sequence.stats)

    def _remove(self, row: _Running) -> None:
        """Take a row out of the batch, and keep what was read of it."""
        context = self._batch.leave(row)
        if context is not None:
            owner = self._scopes.owner(row.job.key)
            self._prefixes.keep(owner, row.sequence.tokens[:-1], context)
            self.metrics.prefix_bytes.set(self._prefixes.nbytes)

    def _finish(
        self,
        job: Job,
        reason: str,
        event: Ended | ApiError | None = None,
        stats: Stats | None = None,
    ) -> None:
        """Finish a job that was taken from the queue.

        Args:
            job: is not in the batch any more.
            reason: "stop", "length", "abort" or "error".
            event: is reported; None: nobody waits.
            stats: counts and times; None: it was not decoded.
        """
        stats, taken = stats or Stats(), monotonic() - job.arrived
        self._admission.finished(taken)
        self.metrics.ended(reason, stats, taken)
        answer = f"{len(job.answer.prompt)} + {stats.new_tokens} tokens, MAT {stats.mat:.2f}"
        logger.info("%s: %s, %.1f s, %s", job.caller, answer, taken, reason)
        if (line := self._reminder.due(why_slow(stats))) is not None:
            logger.warning(line)
        if event is not None:
            job.emit(event)

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        """Report a fault of the server."""
        log_fault("a request failed", error)
        for job in jobs:
            message = f"{type(error).__name__}: {one_line(error, 200)}"
            self._finish(job, "error", ApiError(message, status=500))
