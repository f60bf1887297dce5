"""Decoding with fused steps: compiled, on a GPU captured, and the host one step behind."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from token_recycling.accept import Stop, read
from token_recycling.adjacency import STATE
from token_recycling.drafters import BudgetDrafter, Drafter
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.fused import FusedStep
from token_recycling.metrics import Step
from token_recycling.target import TreeTarget

SMALLEST = 256  # slots of the smallest cache; every further one is twice as large
AHEAD = 64  # slots left beyond the first step, so that a cache lasts for some
LAG = 1  # steps that the host is behind on a GPU
WARM_UP = 3  # runs before a capture
KEPT = 8  # steps kept with their caches
VARIANTS = 64  # compiled, of one function; PyTorch's own bound is 8


class FusingError(TokenRecyclingError):
    """The step of this model and drafter does not compile here."""


class Runner:
    """Runs a ``FusedStep`` over and over: compiled as one graph, and on a GPU captured."""

    def __init__(self, step: FusedStep) -> None:
        """Compile and warm up; no row is active yet, so that nothing is learnt or kept.

        Raises:
            FusingError: it does not compile as one graph.
        """
        self.step = step
        self._run: Callable[[], Tensor] = torch.compile(step, fullgraph=True)
        cuda = step.target.device.type == "cuda"
        self.lag = LAG if cuda else 0
        try:
            told = self._launch()
            if cuda:
                told = self._capture()
        except Exception as error:  # whatever compilers raise
            raise FusingError(one_line(error, 200)) from error
        self.most = told.shape[1] - 1  # tokens that a step can emit
        self.nodes = step.cache.places.numel()  # tokens that it verifies
        shape = (self.lag + 1, *told.shape)
        self._rows = torch.empty(shape, dtype=torch.long, pin_memory=cuda)
        self._active = torch.empty(shape[:2], dtype=torch.bool, pin_memory=cuda)
        self._events = [_event() if cuda else None for _ in range(self.lag + 1)]
        self._turn = 0

    def _launch(self) -> Tensor:
        limits = {"recompile_limit": VARIANTS, "accumulated_recompile_limit": VARIANTS}
        with torch._dynamo.config.patch(limits), self.step.target.exact, torch.no_grad():
            return self._run()

    def _capture(self) -> Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._launch()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._told = self._launch()
        self._run = self._replay
        return self._told

    def _replay(self) -> Tensor:
        self._graph.replay()
        return self._told

    def launch(self, active: list[bool]) -> Callable[[], list[list[int]]]:
        """Begin a step of the ``active`` rows; return what waits for it and reads it."""
        turn = self._turn = (self._turn + 1) % (self.lag + 1)
        self._active[turn] = torch.tensor(active)
        self.step.active.copy_(self._active[turn], non_blocking=True)
        rows, event = self._rows[turn], self._events[turn]
        rows.copy_(self._run() if event else self._launch(), non_blocking=True)
        if event:
            event.record()

        def wait() -> list[list[int]]:
            if event:
                event.synchronize()
            found: list[list[int]] = rows.tolist()
            return found

        return wait


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class FusedEngine:
    """Decodes with the fused steps of one target and drafter, each made when first needed."""

    def __init__(self, target: TreeTarget, drafter: Drafter) -> None:
        """Decode with ``drafter``; one that follows the clock lends its drafter and its size.

        Raises:
            FusingError: the drafter needs the host, or the model takes no positions.
        """
        self.target, self.given = target, drafter
        self.drafter = drafter.drafter if isinstance(drafter, BudgetDrafter) else drafter
        if not self.drafter.fixed_shapes:
            raise FusingError(f"the drafter {drafter.name} needs the host at every step")
        if not target.takes_positions:
            raise FusingError("the model takes no positions")
        self._runners: dict[tuple[int, int, int], Runner] = {}
        self._places: list[Any] = []

    @property
    def nodes(self) -> int:
        """Tokens that a step verifies at most, the root included."""
        return self.given.size if isinstance(self.given, BudgetDrafter) else 10**6

    def _held(self) -> list[Any]:
        """Where everything lies that a captured step reads; it must stay there."""
        matrix = getattr(self.drafter, "matrix", None)
        learnt = [getattr(matrix, name).data_ptr() for name in STATE] if matrix else []
        return learnt + [weight.data_ptr() for weight in self.target.model.parameters()]

    def runner(self, batch: int, length: int) -> Runner:
        """Return the step for ``batch`` rows of up to ``length`` tokens with room ahead."""
        if (places := self._held()) != self._places:
            self._runners, self._places = {}, places
        slots = SMALLEST
        while slots < length + min(self.nodes, 2 * SMALLEST) + AHEAD:
            slots *= 2
        key = (batch, slots, self.nodes)
        found = self._runners.pop(key, None)
        if found is None:
            step = FusedStep(self.target, self.drafter, batch, slots, self.nodes)
            found = Runner(step)
        self._runners[key] = found  # the latest last
        while len(self._runners) > KEPT:
            del self._runners[next(iter(self._runners))]
        return found

    def reset(self) -> None:
        """Free the caches."""
        self._runners = {}

    def steps(
        self, texts: list[list[int]], active: list[bool], stop: Stop, check: Callable[[], None]
    ) -> Iterator[Step]:
        """Decode as far as fused steps go; whatever is ``active`` then is left to others.

        While a step is out, what is committed lies in its own cache. The target gets it back in
        the end, or when the consumer stops early. A step's whole time counts as verification.

        Args:
            texts: all tokens of every row, the last not read yet; grows in place.
            active: the rows that have not ended; changed in place.
            stop: says after which token a row ends.
            check: raises when the target was used for something else.
        """
        while any(active):
            try:
                runner = self.runner(len(texts), max(map(len, texts)))
            except FusingError as reason:
                warnings.warn(f"decoding without a graph: {reason}", stacklevel=2)
                return
            yield from self._until_full(runner, texts, active, stop, check)

    def _until_full(
        self,
        runner: Runner,
        texts: list[list[int]],
        active: list[bool],
        stop: Stop,
        check: Callable[[], None],
    ) -> Iterator[Step]:
        cache, step = self.target.cache, runner.step
        with torch.no_grad():
            step.begin(texts, active)
        waiting: deque[Callable[[], list[list[int]]]] = deque()
        begun = perf_counter()
        try:
            while any(active):
                check()
                longest = max(map(len, texts)) + runner.most * len(waiting)
                fits = longest + runner.nodes <= step.cache.slots
                if fits:
                    waiting.append(runner.launch(active))
                elif not waiting:
                    return
                if fits and len(waiting) <= runner.lag:
                    continue
                tokens, reasons, drafted = read(waiting.popleft()(), stop, active)
                for row, emitted in enumerate(tokens):
                    texts[row] += emitted
                    active[row] = active[row] and reasons[row] is None
                seconds = perf_counter() - begun
                yield Step(tokens, reasons, drafted, runner.nodes, (0.0, seconds, 0.0, 0.0, 0.0))
                begun = perf_counter()
        finally:
            try:
                check()
            except TokenRecyclingError:
                pass  # the cache is somebody else's by now
            else:
                with self.target.guard():
                    step.cache.give(cache, [len(text) - 1 for text in texts])
