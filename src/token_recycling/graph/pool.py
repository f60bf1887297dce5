"""The captured steps of a model and a drafter: made when first needed, and kept."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.drafting.matrix import STATE
from token_recycling.errors import GraphError, StepError, one_line
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.chooser import TokenChoice
from token_recycling.graph.compilation import WAIT, KernelCompiler
from token_recycling.graph.step import GraphStep, StepSpec
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.lm_head import Float32Head
from token_recycling.model.target import TreeTarget
from token_recycling.util.modes import ordinary_tensors

SMALLEST = 256  # slots of the smallest cache
# The same on a GPU, of all rows together: to capture a step for more slots takes a second, and
# attention reads no empty ones.
SMALLEST_CUDA = 2048
SPARE_SLOTS = 64  # spare slots of a new cache beyond the first step
MOST_STEPS = 4  # that are kept; those for as many rows and slots share a cache


def slots_for(length: int, size: int, smallest: int = SMALLEST) -> int:
    """Return the slots of the smallest cache for texts of ``length`` and drafts of ``size``.

    There is room for the two steps in which the graph is compared (see ``trial``), and some more.
    ``smallest`` is rounded up to a power of two.
    """
    slots = 1 << (smallest - 1).bit_length()
    while slots < length + size + max(SPARE_SLOTS, 2 * size):  # powers of two, and halfway between
        slots = slots * 3 // 2 if slots & (slots - 1) == 0 else slots * 4 // 3
    return slots


class StepPool:
    """Captured steps by what they are made for; those that were used last are kept.

    Attributes:
        kernels: whether steps may use Triton kernels; the caller ends that when they fail.
    """

    def __init__(self, target: TreeTarget, drafter: AnyDrafter) -> None:
        """Make steps of ``target`` with ``drafter``.

        Raises:
            GraphError: the model cannot be captured.
        """
        model = target.model
        if {weight.device for weight in model.parameters()} != {target.device}:
            raise GraphError("the model is on several devices")
        written = getattr(model.get_output_embeddings(), "out_features", target.vocab_size)
        if written != target.vocab_size:
            raise GraphError("the LM head is wider than the vocabulary")
        if not target.takes_positions:
            raise GraphError("the model takes no position ids")
        self.target, self.drafter = target, drafter
        self.kernels = has_device_kernels(target.device)
        dtype = torch.float32 if isinstance(target.lm_head, Float32Head) else target.dtype
        self._compiler = KernelCompiler(drafter, target.device, dtype)
        self._patience = 0.0  # seconds that this answer may still wait for kernels
        self._steps: dict[StepSpec, CapturedStep] = {}
        self._failed: dict[StepSpec, GraphError] = {}
        self._addresses: list[Any] = []
        if self.kernels and target.device.type == "cuda" and drafter.matrix is not None:
            # Every answer copies it to the device and back.
            with ordinary_tensors(), suppress(RuntimeError):
                drafter.matrix.pin_memory()

    def begin(self) -> None:
        """Begin an answer, which may wait for kernels."""
        self._patience = WAIT

    def get(
        self, batch: int, length: int, size: int, draft_size: int, choice: TokenChoice
    ) -> CapturedStep:
        """Return the step for texts of up to ``length`` tokens, with spare slots.

        Args:
            batch: B.
            length: tokens of the longest text.
            size: tokens that the step verifies per row.
            draft_size: those of a step with a draft, whose kernels are compiled first, even where
                this step has none.
            choice: of tokens.

        Raises:
            GraphError: it cannot be created.
        """
        if (addresses := self._captured_addresses()) != self._addresses:
            self._steps, self._failed, self._addresses = {}, {}, addresses
        slots = self._slots(batch, length, size)
        kernels = self.kernels
        if kernels:
            self._compiler.ask(batch, self._slots(batch, length, draft_size), draft_size)
            begun = perf_counter()
            kernels = self._compiler.ready(batch, slots, size, self._patience)
            self._patience = max(0.0, self._patience - (perf_counter() - begun))
        spec = StepSpec(batch, slots, size, kernels, choice)
        if spec in self._failed:
            raise self._failed[spec]
        step = self._steps.pop(spec, None)
        if step is None:
            try:
                step = self._make(spec)
            except GraphError as reason:
                self._failed[spec] = reason
                raise
        self._steps[spec] = step  # most recently used last
        while len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return step

    def _captured_addresses(self) -> list[Any]:
        """Return what captured steps were made for, which a replay would not notice."""
        matrix = self.drafter.matrix
        learnt = [getattr(matrix, name).data_ptr() for name in STATE] if matrix else []
        copied = getattr(self.target.lm_head, "weight", None)  # float32 copy of the LM head
        return [learnt, self.target.generation, None if copied is None else copied.data_ptr()]

    def _slots(self, batch: int, length: int, size: int) -> int:
        """Return the slots of the smallest cache on this device (see ``slots_for``)."""
        cuda = self.target.device.type == "cuda"
        smallest = max(SMALLEST, SMALLEST_CUDA // batch) if cuda else SMALLEST
        return slots_for(length, size, smallest)

    def _cache_of(self, batch: int, slots: int) -> FixedCache | None:
        """Return the cache of a kept step for as many rows and slots, or None."""
        caches = (captured.step.cache for captured in self._steps.values())
        return next(
            (cache for cache in caches if (cache.batch, cache.slots) == (batch, slots)), None
        )

    def _make(self, spec: StepSpec) -> CapturedStep:
        with ordinary_tensors():  # the caller may be in inference mode
            for _ in range(2):
                cache = self._cache_of(spec.batch, spec.slots)
                try:
                    return CapturedStep(GraphStep(self.target, self.drafter, spec, cache))
                except torch.OutOfMemoryError:
                    self._steps = {}  # free their caches, then retry
                    del cache
                except GraphError:
                    raise
                except Exception as error:  # Triton's compiler may raise anything
                    raise StepError(one_line(error, 200)) from error
        raise GraphError(f"not enough memory for a cache of {spec.batch} x {spec.slots} tokens")
