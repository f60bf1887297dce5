"""Continuous batching: rows are decoded together, and join and leave between steps."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from token_recycling.accept import Acceptor, RowAcceptor
from token_recycling.decode import Decoding, Hooks, read_prompts
from token_recycling.draft_size.base import DraftSize
from token_recycling.drafters.base import AnyDrafter
from token_recycling.drafters.grouped import GroupedDrafter
from token_recycling.graph.decoder import GraphDecoder, can_capture
from token_recycling.metrics import Step
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import OnProgress, Target, TreeTarget
from token_recycling.sequence import Sequence

T = TypeVar("T")


def remove(rows: list[T], row: int) -> None:
    """Remove an element; the last one takes its place, as in ``RecyclingCache.remove``."""
    rows[row] = rows[-1]
    rows.pop()


class ContinuousBatch:
    """The rows that are decoded together, and their keys and values.

    A target that cannot verify trees keeps its own state, so it has one row at a time.

    Attributes:
        sequences: the rows.
    """

    def __init__(self, target: Target, size: DraftSize, graph: GraphDecoder | None = None) -> None:
        """Create a batch without rows.

        Args:
            target: used by nothing else while the batch has rows.
            size: the draft-size policy.
            graph: runs the steps of a single row; None: the eager loop.
        """
        self._target, self._size, self._graph = target, size, graph
        self.sequences: list[Sequence] = []
        self._accepts: list[Acceptor] = []
        self._drafters: list[AnyDrafter] = []
        self._cache: RecyclingCache | None = None
        self._steps: Generator[Step, None, None] | None = None

    def join(
        self,
        sequence: Sequence,
        accept: Acceptor,
        drafter: AnyDrafter,
        *,
        prefix: RecyclingCache | None = None,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """Read the prompt of a new row, which becomes the last one; choose its first token.

        Args:
            sequence: the row.
            accept: chooses its tokens.
            drafter: proposes its drafts.
            prefix: cache of a single row with the first tokens of the prompt; it is used up.
            on_progress: called between the chunks of the prompt; it may call ``step``, and if it
                raises, the row does not join.

        Raises:
            TokenRecyclingError: the prompt is empty or longer than the context.
        """
        self._stop()
        sequence.cached = 0 if prefix is None else prefix.end
        outer = self._swap(prefix)
        try:
            step = read_prompts(
                self._target,
                drafter,
                accept,
                [sequence],
                learns=self._size.pays,
                on_progress=on_progress,
            )
        finally:
            own = self._swap(outer)
        self._stop()  # steps may have been taken while the prompt was read
        if own is not None and self._cache is not None:
            with self._target.inference_context():
                self._cache.append(own)
        else:
            self._cache = own
        self.sequences.append(sequence)
        self._accepts.append(accept)
        self._drafters.append(drafter)
        return step

    def step(self) -> Step:
        """Take one step with all rows; all must be active."""
        outer = self._swap(self._cache)
        try:
            if self._steps is None:
                self._steps = self._begin()
            return next(self._steps)
        finally:
            self._cache = self._swap(outer)

    def copy(self, row: int, slots: int) -> RecyclingCache | None:
        """Return a copy of the first entries of a row; None if the target has no trees."""
        self._stop()
        return None if self._cache is None else self._cache.copy(row, slots)

    def leave(self, row: int) -> RecyclingCache | None:
        """Remove a row; the last one takes its place.

        Returns:
            Its keys and values, those of all its tokens but the last; None if the target has no
            trees.
        """
        self._stop()
        remove(self.sequences, row)
        remove(self._accepts, row)
        remove(self._drafters, row)
        cache = self._cache
        if cache is None:
            return None
        if cache.rows == 1:  # nothing else needs it
            self._cache = None
            return cache
        own = cache.copy(row)
        with self._target.inference_context():
            cache.remove(row)
        return own

    def release(self) -> None:
        """Free the room of rows that have left, if there are no others."""
        if not self.sequences:
            self._cache = None

    def clear(self) -> None:
        """Remove all rows, after an exception too."""
        self._steps = self._cache = None
        self.sequences, self._accepts, self._drafters = [], [], []

    def _begin(self) -> Generator[Step, None, None]:
        """Return the steps of the present rows."""
        accept, drafter = RowAcceptor(self._accepts), self._drafters[0]
        if any(other is not drafter for other in self._drafters):
            drafter = GroupedDrafter(self._drafters)
        single = len(self.sequences) == 1 and can_capture(self._accepts[0])
        graph = self._graph if single and self._graph and self._graph.drafter is drafter else None
        choose = self._accepts[0] if single else accept
        sequences = list(self.sequences)
        decoding = Decoding(self._target, drafter, self._size, choose, sequences, graph, Hooks())
        decoding.load([sequence.tokens[:-1] for sequence in sequences])
        return decoding.decode()

    def _stop(self) -> None:
        """End the steps; a graph then gives the keys and values back."""
        if self._steps is None:
            return
        outer = self._swap(self._cache)
        try:
            self._steps.close()
        finally:
            self._steps = None
            self._cache = self._swap(outer)

    def _swap(self, cache: RecyclingCache | None) -> RecyclingCache | None:
        """Let the target work with ``cache`` (None: an empty one); return the one that it had."""
        if not isinstance(self._target, TreeTarget):
            return None
        had = self._target.cache
        self._target.reset()
        if cache is not None:
            self._target.cache = cache
        return had
