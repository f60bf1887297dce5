"""Compiling what captured steps launch, in threads, so that no answer waits long for it."""

from __future__ import annotations

import atexit
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch

from skinny_kernels.errors import one_line
from skinny_kernels.gpu.attention import TreeView, paths_of
from skinny_kernels.gpu.choice import interpreted
from skinny_kernels.gpu.launch import KernelLaunch, collected
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import chains
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.errors import StepError
from token_recycling.graph.drafting import drafts_on_device
from token_recycling.model.limits import attention_windows, head_shapes, position_limit, text_config

logger = logging.getLogger(__name__)
MOST_THREADS = 4  # that compile at once; more than one only where there are two cores for each
# Shapes of the tensors whose launches are collected; none is compiled in.
NODES, SLOTS = 16, 256
META = torch.device("meta")


class _Compilers:
    """Threads that compile kernels, in the order in which they were asked for.

    Triton releases the interpreter's lock while it compiles, so that others go on. Unlike those of
    ``concurrent.futures``, these threads end with the process: they finish the kernels at which
    they are, since LLVM must not be left in the middle, and drop the others.
    """

    def __init__(self, threads: int) -> None:
        """Start no thread before there is something to compile."""
        self._most = threads
        self._queue: SimpleQueue[tuple[Future[None], KernelLaunch, torch.device] | None]
        self._queue = SimpleQueue()
        self._threads: list[Thread] = []
        self._known: dict[Any, Future[None]] = {}
        self._locks: defaultdict[Any, Lock] = defaultdict(Lock)  # one variant at a time, by kernel
        self._ended = False

    def submit(self, launches: list[KernelLaunch], device: torch.device) -> list[Future[None]]:
        """Compile the kernels of ``launches`` for a GPU; an error is that of its future."""
        if device.type == "cuda" and device.index is None:  # another one may be current in a thread
            device = torch.device("cuda", torch.cuda.current_device())
        futures = []
        for launch in launches:
            key = launch.signature, device
            if key not in self._known:
                self._known[key] = Future()
                self._queue.put((self._known[key], launch, device))
            futures.append(self._known[key])
        if self._ended:
            self._drop()
        if launches and not self._threads:
            atexit.register(self.end)
            for number in range(self._most):
                self._threads.append(
                    Thread(target=self._work, name=f"kernels-{number}", daemon=True)
                )
                self._threads[-1].start()
        return futures

    def end(self) -> None:
        """Begin no other kernel, and wait for those that are being compiled."""
        self._ended = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._drop()

    def _drop(self) -> None:
        """Give up the kernels that were not begun; who waits for one would wait for ever."""
        for future in self._known.values():
            if not future.done():
                future.set_exception(RuntimeError("the process ends"))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None and not self._ended:
            future, launch, device = job
            try:
                on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
                with on_device, self._locks[launch.kernel]:
                    launch.compile()
            except BaseException as error:  # compilers may raise anything
                future.set_exception(error)
            else:
                future.set_result(None)


compilers = _Compilers(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2)))


def launches_of_layers(config: Any, dtype: torch.dtype) -> list[KernelLaunch]:
    """Return what the layers of a model launch in a step, by its configuration.

    Args:
        config: of a model; layers of another form than Llama's launch less, or something else.
        dtype: of its weights.
    """
    from skinny_kernels.gpu import attention_launch, cache_kernel, elementwise_kernel

    heads, shared, size = head_shapes(config)
    config = text_config(config)
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or hidden
    x = torch.empty((1, NODES, hidden), dtype=dtype, device=META)
    query = torch.empty((1, NODES, heads, size), dtype=dtype, device=META).transpose(1, 2)
    new = torch.empty((1, NODES, shared, size), dtype=dtype, device=META).transpose(1, 2)
    keys = torch.empty((1, shared, SLOTS, size), dtype=dtype, device=META)
    angles = torch.empty((1, NODES, size), dtype=dtype, device=META)
    gate = torch.empty((1, NODES, inner), dtype=dtype, device=META)
    positions = torch.zeros((1, NODES), dtype=torch.long, device=META)
    draft = chains(positions)
    with collected() as launches:
        elementwise_kernel.rms_norm(x, x[0, 0], getattr(config, "rms_norm_eps", 1e-6))
        elementwise_kernel.rotary(query, new, angles, angles)
        elementwise_kernel.gated(gate, gate)
        cache_kernel.write(keys, keys, query[:, :shared], query[:, :shared], positions[0])
        paths = paths_of(draft.ancestors)
        for window in set(attention_windows(config).values()):
            view = TreeView(positions[:, 0], positions, *paths, window)
            attention_launch.attend(query, keys, keys, view, size**-0.5)
    return launches


def launches_around_layers(config: Any, dtype: torch.dtype) -> list[KernelLaunch]:
    """Return what a step launches for masks, acceptance and commit (see ``launches_of_layers``)."""
    from token_recycling.graph import kernels

    windows, most = attention_windows(config), position_limit(config)
    _, heads, size = head_shapes(config)
    tokens = torch.zeros((1, NODES), dtype=torch.long, device=META)
    draft, roots = chains(tokens), tokens[:, 0]
    entries = torch.empty((1, heads, SLOTS, size), dtype=dtype, device=META)
    with collected() as launches:
        kernels.layout(windows, roots, draft, SLOTS, most, dtype)
        kernels.accept(draft, tokens, roots)
        kernels.commit_entries([entries], roots, roots, tokens, roots)
    return launches


def launches_of_drafts(
    drafter: AdaptiveDrafter, vocab_size: int, dtype: torch.dtype
) -> list[KernelLaunch]:
    """Return what drafting and learning on the device launch.

    Args:
        drafter: whose number of candidates and longest chain count.
        vocab_size: V.
        dtype: of the logits.
    """
    from token_recycling.drafting.device import DeviceMatrix
    from token_recycling.drafting.kernels.device.top_k import device_top_k
    from token_recycling.graph.device_drafting import DeviceDrafting

    drafting = DeviceDrafting(drafter, 1, SLOTS, NODES, DeviceMatrix(drafter, META))
    roots = torch.zeros(1, dtype=torch.long, device=META)
    path = torch.zeros((1, drafting.max_depth + 1), dtype=torch.long, device=META)
    logits = torch.empty((1, drafting.size, vocab_size), dtype=dtype, device=META)
    with collected() as launches:
        draft = drafting.propose(roots)
        drafting.learn_from(
            draft, *device_top_k(logits, drafter.k), Accepted(path, torch.zeros_like(path), roots)
        )
    return launches


class StepKernels:
    """The kernels of the captured steps of one model and drafter, compiled in threads."""

    def __init__(
        self,
        config: Any,
        device: torch.device,
        dtype: torch.dtype,
        drafter: AnyDrafter,
        vocab_size: int,
        logits: torch.dtype | None = None,
    ) -> None:
        """Begin to compile.

        Args:
            config: of the model.
            device: where its weights are.
            dtype: of these.
            drafter: of any kind.
            vocab_size: V.
            logits: dtype of the logits; None: ``dtype``.
        """
        layers: list[KernelLaunch] = []
        steps: list[KernelLaunch] = []
        drafts: list[KernelLaunch] = []
        if not interpreted():
            layers = _if_known(partial(launches_of_layers, config, dtype))
            steps = _if_known(partial(launches_around_layers, config, dtype))
            if drafts_on_device(drafter, 1):
                collect = partial(launches_of_drafts, drafter, vocab_size, logits or dtype)
                drafts = _if_known(collect)
                drafts.sort(key=lambda launch: launch.coalesce)  # those that take longest first
        self._layers, self._steps, self._drafts = (
            compilers.submit(launches, device) for launches in (layers, steps, drafts)
        )

    def wait_for_steps(self) -> None:
        """Wait for what plain steps launch: about two seconds, once on a machine.

        Raises:
            StepError: what a step launches around the layers cannot be compiled.
        """
        wait(self._layers)  # where one of these fails, PyTorch's own is used
        _check(self._steps)

    @property
    def drafts_pending(self) -> bool:
        """Whether kernels for drafts are still being compiled."""
        return not all(future.done() for future in self._drafts)

    def check_drafts(self) -> None:
        """Wait for the kernels that draft and learn.

        Raises:
            StepError: one of them cannot be compiled.
        """
        _check(self._drafts)

    def wait(self, seconds: float) -> None:
        """Wait for all kernels, for at most so many seconds."""
        wait([*self._layers, *self._steps, *self._drafts], seconds)


def _if_known(launches: Callable[[], list[KernelLaunch]]) -> list[KernelLaunch]:
    """Return launches; none, as they are compiled when needed, if a configuration lacks shapes."""
    try:
        return launches()
    except Exception as error:  # whatever unknown configurations raise
        logger.debug("kernels are not compiled ahead: %s", one_line(error, 200))
        return []


def _check(futures: list[Future[None]]) -> None:
    """Wait for futures; raise the first error as a ``StepError`` of one line."""
    wait(futures)
    for future in futures:
        if (error := future.exception()) is not None:
            raise StepError(one_line(error, 200)) from error


def compile_ahead(config: Any, device: torch.device, dtype: torch.dtype, k: int | None) -> None:
    """Begin to compile for a model whose weights are not loaded yet, by its configuration.

    What this turns out not to be compiled for is compiled when the model is there.

    Args:
        config: of the model.
        device: where its weights will be.
        dtype: of these, as far as known.
        k: candidates per entry of the default drafter's matrix; None: another drafter is used.
    """
    try:
        vocab_size = int(text_config(config).vocab_size)
        drafter: AnyDrafter = NoDrafter()
        if k is not None:
            drafter = AdaptiveDrafter(AdjacencyMatrix(vocab_size, min(k, vocab_size)))
        StepKernels(config, device, dtype, drafter, vocab_size)
    except Exception as error:  # a model of an unknown kind, which may be refused later
        logger.debug("nothing is compiled ahead: %s", one_line(error, 200))
