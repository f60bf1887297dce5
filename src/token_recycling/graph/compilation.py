"""Compiling a drafter's kernels in a thread, so that no answer waits long for them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from contextlib import nullcontext

import torch

from token_recycling.drafting.base import AnyDrafter
from token_recycling.errors import StepError, one_line
from token_recycling.graph.drafting import drafts_on_device

WAIT = 1.0  # most seconds that an answer waits; kernels in Triton's cache on disk take less


class KernelCompiler:
    """Compiles the drafter's kernels for the shapes that are asked for, one after another."""

    def __init__(self, drafter: AnyDrafter, device: torch.device, dtype: torch.dtype) -> None:
        """Compile for logits of ``dtype``."""
        self.drafter, self.device, self.dtype = drafter, device, dtype
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kernels")
        self._asked: dict[tuple[int, int, int], Future[None]] = {}

    def ask(self, batch: int, slots: int, size: int) -> Future[None]:
        """Compile the kernels after those that were asked for before.

        Args:
            batch: B.
            slots: most tokens of a row.
            size: nodes of a draft, root included.
        """
        shape = (batch, slots, size)
        if shape not in self._asked:
            self._asked[shape] = self._pool.submit(self._compile, *shape)
        return self._asked[shape]

    def ready(self, batch: int, slots: int, size: int, seconds: float) -> bool:
        """Return True if the kernels are compiled; wait for that for at most ``seconds``.

        Raises:
            StepError: they cannot be compiled.
        """
        try:
            self.ask(batch, slots, size).result(seconds)
        except NotReady:
            return False
        except Exception as error:  # compilers may raise anything
            raise StepError(one_line(error, 200)) from error
        return True

    def _compile(self, batch: int, slots: int, size: int) -> None:
        drafter = self.drafter
        if not drafts_on_device(drafter, size):
            return  # there are none
        from token_recycling.graph.device_drafting import DeviceDrafting  # imports Triton

        cuda = self.device.type == "cuda"
        # Not the default stream, which would wait for a capture in another thread.
        stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device) if cuda else nullcontext(), torch.cuda.stream(stream):
            drafting = DeviceDrafting(drafter, batch, slots, size, self.device)
            drafting.compile(self.dtype)
