"""One graph: a step captured on a GPU, compared with the same step without it, and launched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.draft import root_only
from token_recycling.errors import TokenRecyclingError
from token_recycling.graph.drafting import LAG
from token_recycling.graph.step import GraphStep
from token_recycling.util.machine import median_seconds
from token_recycling.util.modes import ordinary_tensors
from token_recycling.util.tokens import NO_TOKEN

WARM_UP = 3  # runs before the capture
TIES = 4  # roundings of the largest logit within which tokens are all but tied


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage, then not until the end: a graph that is freed would end a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def uncast() -> Iterator[None]:
    """Keep no copies of weights that autocast makes: a graph would read them after their end."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class GraphError(TokenRecyclingError):
    """The step of this model and drafter cannot be run as a graph here."""


class StepError(GraphError):
    """A step cannot be captured, is wrong, or too slow; another one may do."""


class GraphRunner:
    """Runs a ``GraphStep`` repeatedly, on a GPU captured.

    Elsewhere its operations run one by one, more slowly than the eager loop's: what tests need.
    """

    def __init__(self, step: GraphStep) -> None:
        """Warm up, with no active rows, so that nothing is learnt or committed, and capture."""
        self.step = step
        device = step.target.device
        cuda = device.type == "cuda"
        # Streams, captures and events use the current device, so select ours.
        self._on_device = partial(torch.cuda.device, device) if cuda else nullcontext
        self.lag = step.drafting.lag if cuda else 0
        self._graph: torch.cuda.CUDAGraph | None = None
        with self._on_device():
            self._output = output = self._capture() if cuda else self._run()
        # Host buffers of outputs and inputs, one set per step in flight.
        memory: dict[str, Any] = {"device": "cpu", "pin_memory": cuda}
        self._rows = torch.empty((LAG + 1, *output.shape), dtype=torch.long, **memory)
        self._active = torch.empty((LAG + 1, len(output)), dtype=torch.bool, **memory)
        self._turn = 0
        self._checked = False
        self._problem: str | None = None  # why it is not used, once it was checked

    def _run(self) -> Tensor:
        with (
            uncast(),
            self.step.target.lm_head,
            self.step.target.computing(),
            ordinary_tensors(),
        ):
            return self.step.run()

    def _capture(self) -> Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._run()
        current.wait_stream(side)
        for attempt in range(2):
            self._graph = torch.cuda.CUDAGraph()
            capture = torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local")
            try:
                # A capture that fails does not leave its stream.
                with uncollected(), torch.cuda.stream(current), capture:
                    return self._run()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                if attempt:
                    raise
                torch.cuda.synchronize()
        raise AssertionError("the second attempt returns or raises")

    def check(self, sequences: list[Sequence], generators: list[torch.Generator]) -> None:
        """Compare the first two steps with eager ones on these texts; restore what they changed.

        The second step shows what the first one has committed.

        Args:
            sequences: the rows; the last token of each has not been read yet.
            generators: of the sampled rows; empty: the argmax is taken.

        Raises:
            StepError: the two differ by more than rounding explains, or the graph takes longer
                than a plain step of the eager loop.
        """
        if not self._checked:
            if not self._agrees_with_eager(sequences, generators):
                self._problem = "steps of the graph differ from the same steps without it"
            elif self._graph is not None:
                self._problem = self._slower_than_plain(sequences)
            self._checked = True
        if self._problem is not None:
            raise StepError(self._problem)

    def _agrees_with_eager(
        self, sequences: list[Sequence], generators: list[torch.Generator]
    ) -> bool:
        step = self.step
        matrix = step.drafting.drafter.matrix
        with self._on_device(), step.target.lm_head, ordinary_tensors():
            learnt = None if matrix is None else matrix.state()

            def result(run: Callable[[], Tensor]) -> Tensor:
                if matrix is not None and learnt is not None:
                    matrix.restore(learnt)
                step.begin(sequences, generators)
                if step.chooser is not None:
                    step.chooser.draw([2 * step.most] * len(sequences))
                try:
                    return run()
                finally:
                    if step.chooser is not None:
                        step.chooser.rewind([0] * len(sequences))

            def two(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
                return lambda: torch.stack([step.take(run), step.take(run)])

            eager, captured = result(two(step.run)), result(two(self._replay))
            same = captured.equal(eager)
            if not same and step.chooser is None:
                same = self._all_but_tied(result, eager, captured)
            elif not same:  # rounding can change a sampled token of half precision
                same = step.target.dtype != torch.float32
            result(lambda: eager)  # restores the matrix
        return same

    def _slower_than_plain(self, sequences: list[Sequence]) -> str | None:
        """Return in one line that a step takes longer than an eager plain one, or None."""
        target, step = self.step.target, self.step
        with self._on_device(), step.target.lm_head, ordinary_tensors():
            step.active.zero_()  # nothing is committed or learnt
            roots = root_only(torch.tensor([one.tokens[-1] for one in sequences], device="cpu"))
            captured = median_seconds(lambda: step.take(self._replay), target.device)
            plain = median_seconds(lambda: target.verify(roots), target.device)
        if captured <= plain:
            return None
        return (
            f"a captured step of {step.size} tokens takes {captured * 1e3:.1f} ms and a plain step "
            f"of the eager loop {plain * 1e3:.1f} ms"
        )

    def _replay(self) -> Tensor:
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._output

    def _all_but_tied(
        self, result: Callable[[Callable[[], Tensor]], Tensor], eager: Tensor, captured: Tensor
    ) -> bool:
        """Return True if the first tokens that differ have logits that rounding can exchange."""
        step = self.step
        # Up to the first step that differs
        at = 0 if not captured[0].equal(eager[0]) else 1
        logits = result(step.logits if at == 0 else lambda: (step(), step.logits())[1])
        eager, captured = eager[at], captured[at]
        # What the first step has learnt is rounded too, so that the second may draft less or more.
        drafts_differ = at == 1 and step.target.dtype != torch.float32
        batch = torch.arange(len(eager), device="cpu")
        for row, mine, its in zip(batch.tolist(), eager.tolist(), captured.tolist()):
            first = next((i for i in range(1, len(mine)) if mine[i] != its[i]), None)
            if first is None:
                continue
            if NO_TOKEN in (mine[first], its[first]):
                if drafts_differ:
                    continue  # one text is the beginning of the other
                return False
            own = logits[row].float()
            gaps = (own[:, mine[first]] - own[:, its[first]]).abs()
            noise = TIES * torch.finfo(step.target.dtype).eps * own.abs().amax(dim=1)
            # The node is not known here, so that some node must have this tie.
            if not bool((gaps <= noise).any()):
                return False
        return True

    def launch(self, active: list[bool]) -> Callable[[], list[list[int]]]:
        """Launch a step of the ``active`` rows; return a function that waits for its output."""
        turn = self._turn = (self._turn + 1) % (LAG + 1)
        rows, on = self._rows[turn], self._active[turn]
        on.copy_(torch.tensor(active, device="cpu"))
        self.step.drafting.prepare()
        with self._on_device():
            self.step.active.copy_(on, non_blocking=True)
            output = self._replay()
            if self._graph is None:
                rows.copy_(output)
                summary = self.step.read(rows)
                return summary.tolist
            rows.copy_(output, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

        def wait() -> list[list[int]]:
            event.synchronize()
            found: list[list[int]] = self.step.read(rows).tolist()
            return found

        return wait
