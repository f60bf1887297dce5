"""A step that is captured on a GPU, and launched again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.sequence import Sequence
from token_recycling.errors import StepError
from token_recycling.graph.drafting import LAG
from token_recycling.graph.step import GraphStep
from token_recycling.graph.trial import problem

WARM_UP = 2  # runs before the capture: the first one chooses kernels, the second one uses them


class GraphMemory:
    """The stream on which steps of a device are captured, and the memory of their graphs.

    Graphs can share the memory of intermediate results, since only one runs at a time and its
    output is read before another one. PyTorch uses freed memory again on the same stream only.

    Attributes:
        stream: None where nothing is captured.
        handle: of a pool of memory.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream, if the device is a GPU."""
        self._device = device
        self.stream: Any = None
        self.handle: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.renew()

    def renew(self) -> None:
        """Use another pool from now on: one whose capture has failed cannot be used again."""
        if self.stream is not None:
            with torch.cuda.device(self._device):
                self.handle = torch.cuda.graph_pool_handle()


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


class CapturedStep:
    """Runs a ``GraphStep`` repeatedly, on a GPU captured.

    Elsewhere its operations run one by one, more slowly than the eager loop's: what tests need.

    Attributes:
        step: what runs.
        lag: steps by which the host may be behind.
    """

    def __init__(self, step: GraphStep, memory: GraphMemory | None = None) -> None:
        """Warm up, with no active rows, so that nothing is learnt or committed, and capture.

        Args:
            step: what runs.
            memory: what it shares with others; None: its own.
        """
        self.step = step
        device = step.target.device
        self._memory = GraphMemory(device) if memory is None else memory
        cuda = device.type == "cuda"
        # Streams, captures and events use the current device, so select ours.
        self._on_device = partial(torch.cuda.device, device) if cuda else nullcontext
        self.lag = step.drafting.lag if cuda else 0
        self._graph: torch.cuda.CUDAGraph | None = None
        with self._on_device():
            self._output = output = self._capture() if cuda else self._run()
        # Host buffers of outputs and inputs, one set per step in flight.
        host: dict[str, Any] = {"device": "cpu", "pin_memory": cuda}
        self._rows = torch.empty((LAG + 1, *output.shape), dtype=torch.long, **host)
        self._active = torch.empty((LAG + 1, len(output)), dtype=torch.bool, **host)
        self._turn = 0
        self._checked = False
        self._problem: str | None = None  # why it is not used, once it was checked

    def _run(self) -> Tensor:
        with uncast(), ordinary_tensors():
            return self.step.run()

    def _capture(self) -> Tensor:
        memory, side = self._memory, self._memory.stream
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._run()
        current.wait_stream(side)
        first: RuntimeError | None = None
        for _ in range(2):
            self._graph = torch.cuda.CUDAGraph()
            capture = torch.cuda.graph(
                self._graph,
                pool=memory.handle,
                stream=side,
                capture_error_mode="thread_local",
            )
            try:
                # A capture that fails does not leave its stream.
                with uncollected(), torch.cuda.stream(current), capture:
                    return self._run()
            except torch.OutOfMemoryError:
                memory.renew()
                raise
            except RuntimeError as error:
                memory.renew()
                first = first or error
                torch.cuda.synchronize()
        assert first is not None
        raise first

    def replay(self) -> Tensor:
        """Run the step; return its output on the device."""
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._output

    def try_once(self, sequences: list[Sequence], generators: list[torch.Generator]) -> None:
        """Try the graph once, before it is used; it changes nothing (see ``trial``).

        Args:
            sequences: the rows; the last token of each has not been read yet.
            generators: of the sampled rows; empty: the argmax is taken.

        Raises:
            StepError: it must not be used.
        """
        if not self._checked:
            with self._on_device(), ordinary_tensors():
                is_graph = self._graph is not None
                self._problem = problem(self.step, self.replay, sequences, generators, is_graph)
            self._checked = True
        if self._problem is not None:
            raise StepError(self._problem)

    def launch(self, active: list[bool]) -> Callable[[], list[list[int]]]:
        """Launch a step of the ``active`` rows; return a function that waits for its output."""
        turn = self._turn = (self._turn + 1) % (LAG + 1)
        rows, on = self._rows[turn], self._active[turn]
        on.copy_(torch.tensor(active, device="cpu"))
        self.step.drafting.prepare()
        with self._on_device():
            self.step.active.copy_(on, non_blocking=True)
            output = self.replay()
            if self._graph is None:
                rows.copy_(output)
                summary = self.step.learn_from(rows)
                return summary.tolist
            rows.copy_(output, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

        def wait() -> list[list[int]]:
            event.synchronize()
            summaries: list[list[int]] = self.step.learn_from(rows).tolist()
            return summaries

        return wait
