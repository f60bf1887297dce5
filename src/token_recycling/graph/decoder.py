"""Decoding by graphs: which one runs, and the loop; on a GPU the host is one step behind."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any, cast

import torch

from token_recycling.decoding.accept import (
    Acceptor,
    FollowAcceptor,
    GreedyAcceptor,
    append_emitted,
)
from token_recycling.decoding.metrics import Step
from token_recycling.decoding.samplers import RowSampler
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.drafting.matrix import STATE
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.size.base import DraftSize
from token_recycling.errors import TokenRecyclingError, one_line, warn_caller
from token_recycling.graph.chooser import can_choose
from token_recycling.graph.compilation import WAIT, KernelCompiler
from token_recycling.graph.runner import GraphError, GraphRunner, StepError
from token_recycling.graph.step import GraphStep
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.lm_head import Float32Head
from token_recycling.model.target import TreeTarget
from token_recycling.util.modes import ordinary_tensors
from token_recycling.util.tokens import NO_TOKEN

SMALLEST = 256  # slots of the smallest cache
# The same on a GPU, of all rows together: to capture a step for more slots takes a second, and
# attention reads no empty ones.
SMALLEST_CUDA = 2048
SPARE_SLOTS = 64  # spare slots of a new cache beyond the first step
MOST_GRAPHS = 4  # graphs that are kept; those for as many rows and slots share a cache


def can_capture(accept: Acceptor) -> bool:
    """Return True if choices need only logits, texts and random numbers drawn in advance."""
    if isinstance(accept, GreedyAcceptor):
        return True
    if not isinstance(accept, FollowAcceptor) or accept.on_choice is not None:
        return False
    sampler = accept.sampler
    if sampler is not None:
        if not isinstance(sampler, RowSampler):
            return False
        # Several rows without a seed share a generator, in the order in which they advance.
        if None in sampler.generators and len(sampler.generators) > 1:
            return False
    return all(map(can_choose, accept.processors))


def slots_for(length: int, size: int, smallest: int = SMALLEST) -> int:
    """Return the slots of the smallest cache for texts of ``length`` and drafts of ``size``.

    There is room for the two steps that are compared, and some more. ``smallest`` is rounded up to
    a power of two.
    """
    slots = 1 << (smallest - 1).bit_length()
    while slots < length + size + max(
        SPARE_SLOTS, 2 * size
    ):  # powers of two, and halfway between them
        slots = slots * 3 // 2 if slots & (slots - 1) == 0 else slots * 4 // 3
    return slots


class GraphDecoder:
    """Decodes with graphs of one target and drafter, each created when first needed."""

    def __init__(
        self,
        target: TreeTarget,
        drafter: AnyDrafter,
        size: DraftSize,
    ) -> None:
        """Decode with ``drafter``.

        Args:
            target: the model.
            drafter: of any kind.
            size: draft-size policy. Each size is a graph of its own, so all drafts have one, which
                is looked at when an answer begins.

        Raises:
            GraphError: the model cannot be captured, or the drafter never drafts.
        """
        model = target.model
        if {weight.device for weight in model.parameters()} != {target.device}:
            raise GraphError("the model is on several devices")
        written = getattr(model.get_output_embeddings(), "out_features", target.vocab_size)
        if written != target.vocab_size:
            raise GraphError("the LM head is wider than the vocabulary")
        self.target, self.drafter, self.size = target, drafter, size
        if not target.takes_positions:
            raise GraphError("the model takes no position ids")
        self._kernels = has_device_kernels(target.device)  # and none has failed
        dtype = torch.float32 if isinstance(target.lm_head, Float32Head) else target.dtype
        self._compiler = KernelCompiler(drafter, target.device, dtype)
        self._patience = 0.0  # seconds that this answer may still wait for kernels
        self._runners: dict[Any, GraphRunner] = {}
        self._failed: dict[Any, GraphError] = {}
        self._addresses: list[Any] = []
        with ordinary_tensors():
            roots = torch.zeros(1, dtype=torch.long, device="cpu")
            rows = drafter.new_rows(1, SMALLEST)
            self._whole = drafter.propose(rows, roots).size
        if self._whole == 1 and not isinstance(drafter, NoDrafter):
            raise GraphError(f"the drafter {drafter.name} drafts nothing below a text of one token")
        self._drafted = 0  # nodes of a draft; chosen when an answer begins
        if self._kernels and target.device.type == "cuda" and drafter.matrix is not None:
            # Every answer copies it to the device and back.
            with ordinary_tensors(), suppress(RuntimeError):
                drafter.matrix.pin_memory()

    @property
    def next_size(self) -> int:
        """Tokens that the next step should verify, including the root."""
        return self._drafted if self.size.pays else 1

    def _captured_addresses(self) -> list[Any]:
        """Return the addresses that captured steps read, and the modes they were captured in.

        Both may change between calls, which a replay would not notice.
        """
        matrix = self.drafter.matrix
        learnt = [getattr(matrix, name).data_ptr() for name in STATE] if matrix else []
        weights = [weight.data_ptr() for weight in self.target.model.parameters()]
        copied = getattr(self.target.lm_head, "weight", None)  # float32 copy of the LM head
        device = self.target.device.type
        modes = [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), precision()]
        return [learnt, weights, None if copied is None else copied.data_ptr(), modes]

    def _runner(self, batch: int, length: int, follows: FollowAcceptor | None) -> GraphRunner:
        """Return the runner for ``batch`` rows of up to ``length`` tokens, with spare slots.

        Raises:
            GraphError: it cannot be created.
        """
        if has_adapters(self.target.model):
            raise GraphError(
                "the model has adapters, and a graph cannot detect when they are switched"
            )
        if (addresses := self._captured_addresses()) != self._addresses:
            self._runners, self._failed, self._addresses = {}, {}, addresses
        size = self.next_size
        slots = self._slots_for(batch, length, size)
        kernels = self._kernels
        if kernels:  # those of drafts first, even if the first steps are plain
            drafted = self._drafted
            self._compiler.ask(batch, self._slots_for(batch, length, drafted), drafted)
            begun = perf_counter()
            kernels = self._compiler.ready(batch, slots, size, self._patience)
            self._patience = max(0.0, self._patience - (perf_counter() - begun))
        key = (batch, slots, size, _name(follows), kernels)
        if key in self._failed:
            raise self._failed[key]
        runner = self._runners.pop(key, None)
        if runner is None:
            try:
                runner = self._make(batch, slots, size, follows, kernels)
            except GraphError as reason:
                self._failed[key] = reason
                raise
        self._runners[key] = runner  # most recently used last
        while len(self._runners) > MOST_GRAPHS:
            del self._runners[next(iter(self._runners))]
        return runner

    def _slots_for(self, batch: int, length: int, size: int) -> int:
        """Return the slots of the smallest cache on this device (see ``slots_for``)."""
        cuda = self.target.device.type == "cuda"
        smallest = max(SMALLEST, SMALLEST_CUDA // batch) if cuda else SMALLEST
        return slots_for(length, size, smallest)

    def _cache_of(self, batch: int, slots: int) -> FixedCache | None:
        """Return the cache of a kept step for as many rows and slots, or None."""
        caches = (runner.step.cache for runner in self._runners.values())
        return next((one for one in caches if (one.batch, one.slots) == (batch, slots)), None)

    def _make(
        self,
        batch: int,
        slots: int,
        size: int,
        follows: FollowAcceptor | None,
        kernels: bool,
    ) -> GraphRunner:
        with ordinary_tensors():  # the caller may be in inference mode
            for _ in range(2):
                cache = self._cache_of(batch, slots)
                try:
                    step = GraphStep(
                        self.target,
                        self.drafter,
                        batch,
                        slots,
                        size,
                        None if follows is None else follows.processors,
                        cache,
                        sampled=follows is not None and follows.sampler is not None,
                        kernels=kernels,
                    )
                    return GraphRunner(step)
                except torch.OutOfMemoryError:
                    self._runners = {}  # free their caches, then retry
                    del cache
                except GraphError:
                    raise
                except Exception as error:  # Triton's compiler may raise anything
                    raise StepError(one_line(error, 200)) from error
        raise GraphError(f"not enough memory for a cache of {batch} x {slots} tokens")

    def steps(
        self, sequences: list[Sequence], accept: Acceptor, check: Callable[[], None]
    ) -> Iterator[Step]:
        """Decode with graphs until the rows end or a graph cannot continue.

        Rows that are still active afterwards are left to the eager loop. Meanwhile the committed
        keys and values are in the graph's own cache. They are copied back to the target at the
        end, or when the consumer stops early. The whole time of a step counts as verification.

        Args:
            sequences: the rows; the last token of each has not been read yet.
            accept: the acceptor that chose the first tokens; must satisfy ``can_capture``.
            check: raises when the target has been used for something else.
        """
        follows = accept if isinstance(accept, FollowAcceptor) else None
        self.size.begin(len(sequences))
        self._patience = WAIT
        # A drafter may propose fewer nodes than it is asked for.
        self._drafted = min(self.size.typical(self._drafted) or self._whole, self._whole)
        while any(sequence.active for sequence in sequences):
            try:
                longest = max(len(sequence.tokens) for sequence in sequences)
                runner = self._runner(len(sequences), longest, follows)
                runner.check(sequences, generators_of(follows, self.target.device))
            except GraphError as reason:
                if self._kernels and isinstance(reason, StepError):
                    self._kernels = False
                    warn_caller(f"decoding without kernels for drafts: {reason}")
                    continue
                warn_caller(f"decoding without a graph: {reason}")
                return  # Python shows a repeated warning once
            if not (yield from self._fill(runner, sequences, follows, check)):
                return

    def _fill(
        self,
        runner: GraphRunner,
        sequences: list[Sequence],
        follows: FollowAcceptor | None,
        check: Callable[[], None],
    ) -> Generator[Step, None, bool]:
        """Decode until all rows have ended, the cache is full, or the draft size changes.

        Returns:
            False if a forward overflowed and the eager loop must continue.
        """
        cache, step = self.target.cache, runner.step
        first = [len(sequence.tokens) for sequence in sequences]

        def emitted() -> list[int]:
            return [len(sequence.tokens) - own for sequence, own in zip(sequences, first)]

        on_device = list(first)  # lengths on the device, where ended rows may have continued
        with ordinary_tensors():
            step.begin(sequences, generators_of(follows, self.target.device))
        in_flight: deque[Callable[[], list[list[int]]]] = deque()
        begun = perf_counter()
        overflowed = False
        try:
            while any(sequence.active for sequence in sequences):
                check()
                unknown = step.most * len(in_flight)  # upper bound of tokens in flight
                room = max(on_device) + unknown + step.size <= step.cache.slots
                launches = room and step.size == self.next_size
                if launches:
                    if step.chooser is not None:
                        step.chooser.draw([own + unknown + step.most for own in emitted()])
                    in_flight.append(runner.launch([sequence.active for sequence in sequences]))
                elif not in_flight:
                    return True
                if launches and len(in_flight) <= runner.lag:
                    continue
                output = in_flight.popleft()()
                active = [sequence.active for sequence in sequences]
                tokens, reasons, drafted = append_emitted(output, sequences)
                overflowed = any(on and not own for on, own in zip(active, tokens))
                if overflowed:
                    return False
                for row, (_, *chosen) in enumerate(output):
                    on_device[row] += sum(token != NO_TOKEN for token in chosen)
                seconds = (0.0, perf_counter() - begun, 0.0, 0.0, 0.0)
                done = Step(tokens, reasons, drafted, step.size, seconds)
                rows = len(tokens)
                self.size.record(rows, rows * (step.size - 1), done.mean_emitted, sum(seconds))
                if step.chooser is not None:  # others may draw from the same generators
                    step.chooser.rewind(emitted())
                yield done
                if step.chooser is not None:
                    step.chooser.resume()
                begun = perf_counter()
        finally:
            try:
                check()
            except TokenRecyclingError:
                pass  # cache and random state may belong to another answer
            else:
                if step.chooser is not None:
                    step.chooser.rewind(emitted())
                with self.target.inference_context():
                    step.drafting.end()
                    step.cache.store(cache, [len(sequence.tokens) - 1 for sequence in sequences])
            if overflowed:
                with self.target.inference_context():
                    step.cache.clear()
        return True


def precision() -> str:
    """Return how exactly PyTorch multiplies float32 matrices."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer setting of the same was used
        return str(torch.backends.cuda.matmul.fp32_precision)


def generators_of(follows: FollowAcceptor | None, device: torch.device) -> list[torch.Generator]:
    """Return the random generators of the rows; none where the argmax is taken."""
    sampler = None if follows is None else follows.sampler
    if sampler is None:
        return []
    return [one or default_generator(device) for one in cast("Any", sampler).generators]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that PyTorch draws from on a device where none is given."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def has_adapters(model: Any) -> bool:
    """Return True if any layer of ``model`` is a peft adapter layer."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # not imported: no adapters
    if tuners is None:
        return False
    return any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _name(follows: FollowAcceptor | None) -> str:
    """Return a key for what is done to logits, equal for what can share a step."""
    if follows is None:
        return ""
    rows: Any = follows.processors
    listed = [[(type(one).__name__, vars(one)) for one in row] for row in rows]
    return repr((follows.sampler is None, listed))
