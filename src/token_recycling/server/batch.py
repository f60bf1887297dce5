"""Continuous batching: rows are decoded together, and join and leave between steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from token_recycling.decoding.accept import Acceptor, GreedyAcceptor
from token_recycling.decoding.loop import Decoding, Hooks, read_prompts
from token_recycling.decoding.metrics import Step
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.size.base import DraftSize
from token_recycling.graph.decoder import GraphDecoder, can_capture
from token_recycling.graph.pool import MOST_ROWS
from token_recycling.model.base import OnProgress, Target
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import TreeTarget
from token_recycling.server.mixed import GroupedDrafter, RowAcceptor


@dataclass(eq=False)
class Row:
    """A row of the batch.

    Attributes:
        sequence: its tokens.
        accept: chooses them.
        drafter: proposes its drafts.
    """

    sequence: Sequence
    accept: Acceptor
    drafter: AnyDrafter


R = TypeVar("R", bound=Row)


class ContinuousBatch(Generic[R]):
    """The rows that are decoded together, and their keys and values.

    A target that cannot verify trees keeps its own state, so it has one row at a time.

    Attributes:
        rows: the rows, in the order of the cache.
    """

    def __init__(
        self, target: Target, draft_size: DraftSize, graph: GraphDecoder | None = None
    ) -> None:
        """Create a batch without rows.

        Args:
            target: used by nothing else while the batch has rows.
            draft_size: the draft-size policy.
            graph: runs the steps of a single row, and of several greedy ones; None: the eager loop.
        """
        self._target, self._draft_size, self._graph = target, draft_size, graph
        self.rows: list[R] = []
        self._cache: RecyclingCache | None = None
        self._steps: Generator[Step, None, None] | None = None

    def join(
        self,
        row: R,
        *,
        prefix: RecyclingCache | None = None,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """Read the prompt of a new row, which becomes the last one; choose its first token.

        Args:
            row: the row.
            prefix: cache of a single row with the first tokens of the prompt; it is used up.
            on_progress: called between the chunks of the prompt; it may call ``step``, and if it
                raises, the row does not join.

        Raises:
            TokenRecyclingError: the prompt is empty or longer than the context.
        """
        self._stop()

        def progress(done: int, of: int) -> None:
            if on_progress is not None:
                on_progress(done, of)
                # A graph has a copy of the matrix, which must not overwrite what prompts teach.
                if self._graph is not None:
                    self._stop()

        row.sequence.cached = 0 if prefix is None else prefix.end
        before = self._exchange(prefix)
        try:
            step = read_prompts(
                self._target,
                row.drafter,
                row.accept,
                [row.sequence],
                learns=self._draft_size.pays,
                on_progress=progress,
            )
        finally:
            row_cache = self._exchange(before)
        self._stop()  # steps may have been taken while the prompt was read
        if row_cache is not None and self._cache is not None:
            with self._target.inference_context():
                self._cache.append(row_cache)
        else:
            self._cache = row_cache
        self.rows.append(row)
        return step

    def step(self) -> Step:
        """Take one step with all rows; all must be active."""
        with self._in_target():
            if self._steps is None:
                self._steps = self._begin()
            return next(self._steps)

    def copy(self, row: R, slots: int) -> RecyclingCache | None:
        """Return a copy of the first entries of a row; None if the target has no trees."""
        self._stop()
        return None if self._cache is None else self._cache.copy(self.rows.index(row), slots)

    def leave(self, row: R) -> RecyclingCache | None:
        """Remove a row; the last one takes its place.

        Returns:
            Its keys and values, those of all its tokens but the last; None if the target has no
            trees.
        """
        self._stop()
        at = self.rows.index(row)
        self.rows[at] = self.rows[-1]  # as in ``RecyclingCache.remove``
        self.rows.pop()
        cache = self._cache
        if cache is None:
            return None
        if cache.rows == 1:  # nothing else needs it
            self._cache = None
            return cache
        row_cache = cache.copy(at)
        with self._target.inference_context():
            cache.remove(at)
        return row_cache

    def release(self) -> None:
        """Free the room of rows that have left, if there are no others."""
        if not self.rows:
            self._cache = None

    def clear(self) -> None:
        """Remove all rows, after an exception too."""
        self._steps = self._cache = None
        self.rows = []

    def _begin(self) -> Generator[Step, None, None]:
        """Return the steps of the present rows."""
        first = self.rows[0]
        accept = first.accept
        if len(self.rows) > 1 and not all(isinstance(r.accept, GreedyAcceptor) for r in self.rows):
            accept = RowAcceptor([row.accept for row in self.rows])
        drafter = first.drafter
        if any(row.drafter is not drafter for row in self.rows):
            drafter = GroupedDrafter([row.drafter for row in self.rows])
        graph = self._graph
        # Rows that are sampled together would need captured steps of their own for every
        # combination of their settings.
        captured = len(self.rows) <= MOST_ROWS and can_capture(accept)
        if graph is not None and not (graph.drafter is drafter and captured):
            graph = None
        sequences = [row.sequence for row in self.rows]
        decoding = Decoding(
            self._target, drafter, self._draft_size, accept, sequences, graph, Hooks()
        )
        decoding.load([sequence.tokens[:-1] for sequence in sequences])
        return decoding.steps_after_prompts()

    def _stop(self) -> None:
        """End the steps; a graph then gives the keys and values back."""
        if self._steps is not None:
            with self._in_target():
                self._steps.close()
                self._steps = None

    @contextmanager
    def _in_target(self) -> Iterator[None]:
        """Let the target work with the batch's cache; a prompt that is half read has its own."""
        before = self._exchange(self._cache)
        try:
            yield
        finally:
            self._cache = self._exchange(before)

    def _exchange(self, cache: RecyclingCache | None) -> RecyclingCache | None:
        """Give the target a cache (None: an empty one); return the one that it had."""
        if not isinstance(self._target, TreeTarget):
            return None
        had = self._target.cache
        self._target.reset()
        if cache is not None:
            self._target.cache = cache
        return had
