"""Decoding with fused steps: compiled, on a GPU captured, and the host one step behind."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from token_recycling.accept import (
    HOLE,
    Acceptor,
    FollowAcceptor,
    GreedyAcceptor,
    Processors,
    Sequences,
    Stop,
    ordinary_tensors,
    read,
)
from token_recycling.adjacency import STATE
from token_recycling.drafters import BudgetDrafter, Drafter
from token_recycling.draws import RowDraws
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.fused import LAG, FusedStep
from token_recycling.metrics import Step
from token_recycling.target import TreeTarget
from token_recycling.throttle import Throttle

SMALLEST = 256  # slots of the smallest cache; every further one is twice as large
AHEAD = 64  # slots left beyond the first step, so that a cache lasts for some
BACKEND = "inductor"
WARM_UP = 3  # runs before a capture
KEPT = 4  # steps kept with their caches
VARIANTS = 64  # compiled, of one function; PyTorch's own bound is 8
# Processors that look at a node's logits alone, not at the tokens before.
ROW_WISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class FusingError(TokenRecyclingError):
    """The step of this model and drafter does not compile here."""


def can_fuse(accept: Acceptor) -> bool:
    """True when tokens are chosen from each node's logits alone, and draws can be made ahead."""
    if isinstance(accept, GreedyAcceptor):
        return True
    return (
        isinstance(accept, FollowAcceptor)
        and accept.on_choice is None
        and isinstance(accept.draw, RowDraws)
        and None not in accept.draw.generators
        and all(type(one) in ROW_WISE for row in accept.processors for one in cast("Any", row))
    )


def slots_for(tokens: int) -> int:
    """Slots of the smallest cache that has room for ``tokens``."""
    slots = SMALLEST
    while slots < tokens:
        slots *= 2
    return slots


class Runner:
    """Runs a ``FusedStep`` over and over: compiled as one graph, and on a GPU captured."""

    def __init__(self, step: FusedStep) -> None:
        """Compile and warm up; no row is active yet, so that nothing is learnt or kept.

        Raises:
            FusingError: it does not compile as one graph.
        """
        self.step = step
        device = step.target.device
        cuda = device.type == "cuda"
        # Streams, captures and events are those of the current device.
        self._there = partial(torch.cuda.device, device) if cuda else nullcontext
        self.lag = LAG if cuda else 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._compiled = torch.compile(step, fullgraph=True, backend=BACKEND)
        try:
            with self._there():
                told = self._capture() if cuda else self._run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever compilers raise
            raise FusingError(one_line(error, 200)) from error
        # What the host reads and writes, for every step that may be out.
        place: dict[str, Any] = {"device": "cpu", "pin_memory": cuda}
        self._rows = torch.empty((LAG + 1, *told.shape), dtype=torch.long, **place)
        self._active = torch.empty((LAG + 1, len(told)), dtype=torch.bool, **place)
        self._turn = 0

    def _run(self) -> Tensor:
        with (
            torch._dynamo.config.patch(recompile_limit=VARIANTS),
            self.step.target.exact,
            ordinary_tensors(),
        ):
            return self._compiled()

    def _capture(self) -> Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
            self._told = self._run()
        return self._told

    def launch(self, active: list[bool]) -> Callable[[], list[list[int]]]:
        """Begin a step of the ``active`` rows; return what waits for it and reads it."""
        turn = self._turn = (self._turn + 1) % (LAG + 1)
        rows, on = self._rows[turn], self._active[turn]
        on.copy_(torch.tensor(active, device="cpu"))
        with self._there():
            self.step.active.copy_(on, non_blocking=True)
            if self._graph is None:
                rows.copy_(self._run())
                return rows.tolist
            self._graph.replay()
            rows.copy_(self._told, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

        def wait() -> list[list[int]]:
            event.synchronize()
            found: list[list[int]] = rows.tolist()
            return found

        return wait


class FusedEngine:
    """Decodes with the fused steps of one target and drafter, each made when first needed."""

    def __init__(
        self,
        target: TreeTarget,
        drafter: Drafter,
        compiling: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Decode with ``drafter``; one that follows the clock lends its drafter and its size.

        Args:
            target: the model.
            drafter: with ``fixed_shapes``, or around one.
            compiling: entered while a step is made, which may take minutes the first time.

        Raises:
            FusingError: a graph cannot hold the drafter or the model.
        """
        model = target.model
        if {weight.device for weight in model.parameters()} != {target.device}:
            raise FusingError("the model lies on several devices")
        written = getattr(model.get_output_embeddings(), "out_features", target.vocab_size)
        if written != target.vocab_size:
            raise FusingError("its projection is wider than its vocabulary")
        self.target, self.given, self.compiling = target, drafter, compiling
        self.drafter = drafter.drafter if isinstance(drafter, BudgetDrafter) else drafter
        if not self.drafter.fixed_shapes:
            raise FusingError(f"the drafter {drafter.name} needs the host at every step")
        if not target.takes_positions:
            raise FusingError("the model takes no positions")
        self._throttle: Throttle | None = None
        if isinstance(drafter, BudgetDrafter):
            self._throttle = Throttle(drafter.size, drafter.costs)
        with ordinary_tensors():
            probe = copy.copy(self.drafter)
            probe.settle([[]], SMALLEST)
            roots = torch.zeros(1, dtype=torch.long, device=target.device)
            self._whole = probe.propose(roots).nodes
        self._runners: dict[Any, Runner] = {}
        self._failed: dict[Any, FusingError] = {}
        self._places: list[Any] = []

    @property
    def nodes(self) -> int:
        """Tokens that the next step should verify, the root included."""
        return self._whole if self._throttle is None else self._throttle.nodes

    def _held(self) -> list[Any]:
        """Where everything lies that a captured step reads, and how it is to be computed.

        Others may have changed it, and a replay would not notice.
        """
        matrix = getattr(self.drafter, "matrix", None)
        learnt = [getattr(matrix, name).data_ptr() for name in STATE] if matrix else []
        weights = [weight.data_ptr() for weight in self.target.model.parameters()]
        copied = getattr(self.target.exact, "weight", None)  # of the last projection
        modes = [torch.is_autocast_enabled(), torch.get_float32_matmul_precision()]
        return [learnt, weights, None if copied is None else copied.data_ptr(), modes]

    def _runner(self, batch: int, length: int, processors: Sequence[Processors] | None) -> Runner:
        """Return the step for ``batch`` rows of up to ``length`` tokens, with room ahead.

        Raises:
            FusingError: it cannot be made.
        """
        if has_adapters(self.target.model):
            raise FusingError("adapters may be switched where a graph does not see it")
        if (places := self._held()) != self._places:
            self._runners, self._failed, self._places = {}, {}, places
        nodes = self.nodes
        slots = slots_for(length + nodes + AHEAD)
        key = (batch, slots, nodes, tuple(map(_name, processors or ())))
        if key in self._failed:
            raise self._failed[key]
        runner = self._runners.pop(key, None)
        if runner is None:
            try:
                runner = self._make(batch, slots, nodes, processors)
            except FusingError as reason:
                self._failed[key] = reason
                raise
        self._runners[key] = runner  # the latest last
        while len(self._runners) > KEPT:
            del self._runners[next(iter(self._runners))]
        return runner

    def _make(
        self, batch: int, slots: int, nodes: int, processors: Sequence[Processors] | None
    ) -> Runner:
        with ordinary_tensors(), self.compiling():  # the caller may be in inference mode
            for _ in range(2):
                try:
                    step = FusedStep(self.target, self.drafter, batch, slots, nodes, processors)
                    return Runner(step)
                except torch.OutOfMemoryError:
                    self._runners = {}  # they hold caches of their own
        raise FusingError(f"there is no memory for a cache of {batch} x {slots} tokens")

    def steps(
        self,
        texts: list[list[int]],
        active: list[bool],
        accept: Acceptor,
        stop: Stop,
        check: Callable[[], None],
    ) -> Iterator[Step]:
        """Decode as far as fused steps go; whatever is ``active`` then is left to others.

        While a step is out, what is committed lies in its own cache. The target gets it back in
        the end, or when the consumer stops early. A step's whole time counts as verification.

        Args:
            texts: all tokens of every row, the last not read yet; grows in place.
            active: the rows that have not ended; changed in place.
            accept: chose the first tokens; one that ``can_fuse``.
            stop: says after which token a row ends.
            check: raises when the target was used for something else.
        """
        sampler = accept if isinstance(accept, FollowAcceptor) else None
        while any(active):
            try:
                processors = None if sampler is None else sampler.processors
                runner = self._runner(len(texts), max(map(len, texts)), processors)
            except FusingError as reason:
                warnings.warn(f"decoding without a graph: {reason}", stacklevel=2)
                break  # Python shows the same warning once
            if not (yield from self._fill(runner, texts, active, sampler, stop, check)):
                break
        if sampler is not None:
            sampler.sequences = Sequences(texts, self.target.device)

    def _fill(
        self,
        runner: Runner,
        texts: list[list[int]],
        active: list[bool],
        sampler: FollowAcceptor | None,
        stop: Stop,
        check: Callable[[], None],
    ) -> Generator[Step, None, bool]:
        """Decode until the rows have ended, the cache is full, or another size is wanted.

        Returns:
            False after a forward that overflowed: the readable loop is to go on.
        """
        cache, step = self.target.cache, runner.step
        first = [len(text) for text in texts]
        held = list(first)  # as the device has it: a row that ended may have gone on there
        with ordinary_tensors():
            step.begin(texts, active)
            if step.draws is not None and sampler is not None:
                step.draws.begin(cast("Any", sampler.draw).generators)
        waiting: deque[Callable[[], list[list[int]]]] = deque()
        begun = perf_counter()
        spoiled = False
        try:
            while any(active):
                check()
                out = step.most * len(waiting)  # tokens that are not known yet, at most
                longest = max(held)
                room = longest + out + step.nodes <= step.cache.slots
                goes_on = room and step.nodes == self.nodes
                if goes_on:
                    if step.draws is not None:
                        for row, text in enumerate(texts):
                            step.draws.draw(row, len(text) - first[row] + out + step.most)
                    waiting.append(runner.launch(active))
                elif not waiting:
                    return True
                if goes_on and len(waiting) <= runner.lag:
                    continue
                rows = waiting.popleft()()
                tokens, reasons, drafted = read(rows, stop, active)
                spoiled = any(on and not emitted for on, emitted in zip(active, tokens))
                if spoiled:
                    return False
                for row, emitted in enumerate(tokens):
                    texts[row] += emitted
                    held[row] += sum(token != HOLE for token in rows[row][1:])
                    active[row] = active[row] and reasons[row] is None
                if self._throttle is not None:
                    count = max(1, sum(map(bool, tokens)))
                    self._throttle.note(sum(map(len, tokens)) / count, len(texts), longest)
                seconds = perf_counter() - begun
                yield Step(tokens, reasons, drafted, step.nodes, (0.0, seconds, 0.0, 0.0, 0.0))
                begun = perf_counter()
        finally:
            try:
                check()
            except TokenRecyclingError:
                pass  # the cache is somebody else's by now, and the draws may be
            else:
                if step.draws is not None and any(active):
                    for row, text in enumerate(texts):
                        step.draws.rewind(row, len(text) - first[row])
                with self.target.guard():
                    step.cache.give(cache, [len(text) - 1 for text in texts])
            if spoiled:
                with self.target.guard():
                    step.cache.clear()
        return True


def has_adapters(model: Any) -> bool:
    """True when a layer of ``model`` is one of peft's, however it came there."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # not imported: there can be none
    if tuners is None:
        return False
    return any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _name(processors: Processors) -> str:
    """Name what processors of one row do, so that equal ones share a step."""
    return repr([(type(one).__name__, vars(one)) for one in cast("Any", processors)])
