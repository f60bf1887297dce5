"""The captured steps of a model and a drafter: made when first needed, and kept."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from skinny_kernels.errors import one_line
from skinny_kernels.gpu.choice import has_device_kernels
from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.matrix import STATE
from token_recycling.drafting.none import NoDrafter
from token_recycling.errors import GraphError, StepError, warn_caller
from token_recycling.graph.captured_step import CapturedStep, GraphMemory
from token_recycling.graph.chooser import TokenChoice
from token_recycling.graph.compilation import StepKernels
from token_recycling.graph.drafting import drafts_on_device
from token_recycling.graph.step import Drafts, GraphStep, StepSpec
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.lm_head import Float32Head
from token_recycling.model.target import TreeTarget

SMALLEST = 256  # slots of the smallest cache
# On a GPU a step for more slots is another one to capture, and attention reads no empty ones. So a
# row gets 2,048 slots, of several rows each its part, but at least 512; and up to as many as its
# answer may fill, within ``MOST_RESERVED`` for all rows together.
SMALLEST_CUDA, SMALLEST_ROW = 2048, 512
MOST_RESERVED = 8192
SPARE_SLOTS = 64  # spare slots of a new cache beyond the first step
# Steps that are kept: all sizes for two or three numbers of rows. Those for as many rows and slots
# share a cache, and all share the drafter's matrix and the memory of intermediate results.
MOST_STEPS = 16
MOST_BYTES = 1 << 32  # of the caches of kept steps; more only for a single one
MOST_ROWS = 16  # that are padded to a power of two, so that few numbers of rows are captured


def slots_for(length: int, size: int, smallest: int = SMALLEST) -> int:
    """Return the slots of the smallest cache for texts of ``length`` and drafts of ``size``.

    There is room for the two steps in which the graph is compared (see ``trial``), and some more.
    ``smallest`` is rounded up to a power of two.
    """
    slots = 1 << (smallest - 1).bit_length()
    while slots < length + size + max(SPARE_SLOTS, 2 * size):  # powers of two, and halfway between
        slots = slots * 3 // 2 if slots & (slots - 1) == 0 else slots * 4 // 3
    return slots


def padded_rows(rows: int) -> int:
    """Return the rows of a step that serves so many; the others are never active."""
    return 1 << (rows - 1).bit_length() if rows <= MOST_ROWS else rows


class StepPool:
    """Captured steps by what they are made for; those that were used last are kept."""

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
        self._steps: dict[StepSpec, CapturedStep] = {}
        self._failed: dict[StepSpec, GraphError] = {}
        self._addresses: list[Any] = []
        self._matrix: Any = None  # the drafter's, on the device
        self._memory = GraphMemory(target.device)
        self._kernels: StepKernels | None = None
        if has_device_kernels(target.device):
            dtype = torch.float32 if isinstance(target.lm_head, Float32Head) else target.dtype
            self._kernels = StepKernels(
                model.config, target.device, target.dtype, drafter, target.vocab_size, dtype
            )
        self._drafts_on_device = self._kernels is not None and drafts_on_device(drafter, 1)
        if self._drafts_on_device and target.device.type == "cuda" and drafter.matrix is not None:
            # Every answer copies it to the device and back.
            with ordinary_tensors(), suppress(RuntimeError):
                drafter.matrix.pin_memory()

    @property
    def pending(self) -> bool:
        """Whether kernels that draft are still being compiled; steps are plain meanwhile."""
        return self._drafts_on_device and self._kernels is not None and self._kernels.drafts_pending

    def wait(self, seconds: float) -> None:
        """Wait until kernels are compiled, for at most so many seconds."""
        if self._kernels is not None:
            self._kernels.wait(seconds)

    def get(
        self,
        sequences: list[Sequence],
        generators: list[torch.Generator],
        size: int,
        choice: TokenChoice,
    ) -> CapturedStep:
        """Return a step for rows, with spare slots, which has been tried (see ``trial``).

        To be called after ``wait_for_steps``.

        Args:
            sequences: the rows, as many as ``padded_rows`` returns; the last token of each has not
                been read yet.
            generators: of the sampled rows; empty: the argmax is taken.
            size: tokens that the step verifies per row; while ``pending``, steps are plain.
            choice: of tokens.

        Raises:
            GraphError: it cannot be captured, or gives wrong results.
        """
        if (addresses := self._captured_addresses()) != self._addresses:
            self._forget()
            self._failed, self._addresses, self._matrix = {}, addresses, None
        drafts = self._drafts(size)
        size = 1 if drafts == "none" else size
        now = self._slots(sequences, size, reserve=False)
        spec = StepSpec(len(sequences), now, size, self._kernels is not None, drafts, choice)
        spec = self._kept(spec) or replace(spec, slots=self._slots(sequences, size, reserve=True))
        while True:
            known = spec in self._failed
            try:
                return self._tried(spec, sequences, generators)
            except GraphError as reason:
                # Without what it refers to: frames of the failed step, and all of its memory.
                self._failed[spec] = type(reason)(str(reason))
                self._steps.pop(spec, None)
                if spec.slots > now and not isinstance(reason, StepError):  # too much was reserved
                    spec = replace(spec, slots=now)
                    continue
                if not (spec.kernels and isinstance(reason, StepError)):
                    raise
                if not known:
                    warn_caller(f"decoding without kernels for drafts: {reason}")
            # Only this step goes without: a kernel that fails for one shape may serve others.
            drafts = "host" if spec.drafts == "device" else spec.drafts
            spec = replace(spec, kernels=False, drafts=drafts)

    def _tried(
        self, spec: StepSpec, sequences: list[Sequence], generators: list[torch.Generator]
    ) -> CapturedStep:
        """Return a step that has been tried (see ``get``)."""
        step = self._step(spec)
        try:
            step.try_once(sequences, generators)
        except torch.OutOfMemoryError as error:
            self._forget()
            raise GraphError("not enough memory to try a step") from error
        return step

    def _kept(self, spec: StepSpec) -> StepSpec | None:
        """Return what a kept step was made for that serves as ``spec`` would, with more slots."""
        alike = [
            kept
            for kept in self._steps
            if kept.slots >= spec.slots and replace(kept, slots=spec.slots) == spec
        ]
        return min(alike, key=lambda kept: kept.slots, default=None)

    def _forget(self) -> None:
        """Free all steps and their caches."""
        self._steps = {}
        self._memory.renew()

    def wait_for_steps(self) -> None:
        """Wait for the kernels of plain steps."""
        if self._kernels is not None:
            try:
                self._kernels.wait_for_steps()
            except StepError as reason:
                self._give_up(reason)
                self._kernels = None

    def _drafts(self, size: int) -> Drafts:
        """Return where a step of ``size`` tokens drafts (see ``StepSpec``)."""
        if isinstance(self.drafter, NoDrafter):
            return "none"
        if not (self._drafts_on_device and drafts_on_device(self.drafter, size)):
            return "host"
        assert self._kernels is not None
        if self._kernels.drafts_pending:
            return "none"
        try:
            self._kernels.check_drafts()
        except StepError as reason:
            self._give_up(reason)
            return "host"
        return "device"

    def _give_up(self, reason: StepError) -> None:
        """Draft on the host from now on."""
        self._drafts_on_device = False
        warn_caller(f"decoding without kernels for drafts: {reason}")

    def _step(self, spec: StepSpec) -> CapturedStep:
        """Return a kept step, or a new one."""
        if (reason := self._failed.get(spec)) is not None:
            raise type(reason)(str(reason))
        step = self._steps.pop(spec, None)
        if step is None:
            step = self._make(spec)
        self._steps[spec] = step  # most recently used last
        while len(self._steps) > 1 and not self._fits():
            del self._steps[next(iter(self._steps))]
        return step

    def _fits(self) -> bool:
        """Return whether the kept steps are few, and their caches small."""
        caches = {id(step.step.cache): step.step.cache for step in self._steps.values()}
        used = sum(cache.nbytes for cache in caches.values())
        return len(self._steps) <= MOST_STEPS and used <= MOST_BYTES

    def _captured_addresses(self) -> list[Any]:
        """Return what captured steps were made for, which a replay would not notice."""
        matrix = self.drafter.matrix
        learnt = [getattr(matrix, name).data_ptr() for name in STATE] if matrix else []
        copied = getattr(self.target.lm_head, "weight", None)  # float32 copy of the LM head
        return [learnt, self.target.adoptions, None if copied is None else copied.data_ptr()]

    def _slots(self, sequences: list[Sequence], size: int, *, reserve: bool) -> int:
        """Return the slots of a cache for these rows (see ``slots_for``).

        Args:
            sequences: the rows.
            size: tokens that a step verifies per row.
            reserve: on a GPU, make room for what answers may become (see ``MOST_RESERVED``).
        """
        length = max(len(sequence.tokens) for sequence in sequences)
        if self.target.device.type != "cuda":
            return slots_for(length, size, SMALLEST)
        rows = len(sequences)
        if reserve:
            longest = max(sequence.longest or 0 for sequence in sequences)
            spare = size + max(SPARE_SLOTS, 2 * size)
            length = max(length, min(longest, MOST_RESERVED // rows - spare))
        return slots_for(length, size, max(SMALLEST_ROW, SMALLEST_CUDA // rows))

    def _cache_of(self, batch: int, slots: int) -> FixedCache | None:
        """Return the cache of a kept step for as many rows and slots, or None."""
        caches = (captured.step.cache for captured in self._steps.values())
        return next(
            (cache for cache in caches if (cache.batch, cache.slots) == (batch, slots)), None
        )

    def _make(self, spec: StepSpec) -> CapturedStep:
        with ordinary_tensors():  # the caller may be in inference mode
            for _ in range(2):
                step: GraphStep | None = None
                cache = self._cache_of(spec.batch, spec.slots)
                try:
                    step = GraphStep(
                        self.target, self.drafter, spec, cache, self._device_matrix(spec)
                    )
                    return CapturedStep(step, self._memory)
                except torch.OutOfMemoryError:
                    step = cache = None
                    self._forget()  # free all caches, then retry
                except GraphError:
                    raise
                except Exception as error:  # Triton's compiler may raise anything
                    raise StepError(one_line(error, 200)) from error
        raise GraphError(f"not enough memory for a cache of {spec.batch} x {spec.slots} tokens")

    def _device_matrix(self, spec: StepSpec) -> Any:
        """Return the drafter's matrix on the device, for steps that draft there."""
        if spec.drafts == "device" and self._matrix is None and drafts_on_device(self.drafter, 1):
            from token_recycling.drafting.device import DeviceMatrix  # imports Triton

            self._matrix = DeviceMatrix(self.drafter, self.target.device)
        return self._matrix
