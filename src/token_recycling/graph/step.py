"""The decoding step as one graph: verification, acceptance and commit without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from skinny_kernels.sdpa import add_views, pack_queries
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import DraftTree
from token_recycling.graph import tensors
from token_recycling.graph.chooser import TokenChoice
from token_recycling.graph.drafting import (
    LAG,
    Drafting,
    HostDrafting,
    PlainDrafting,
    drafts_on_device,
)
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.target import TreeTarget

if TYPE_CHECKING:
    from token_recycling.drafting.device import DeviceMatrix

Drafts = Literal["device", "host", "none"]


@dataclass(frozen=True)
class StepSpec:
    """What a step is made for; answers with equal ones share a step.

    Attributes:
        batch: B.
        slots: of the cache.
        size: most tokens that a step verifies per row, root included.
        kernels: use Triton kernels around the forward.
        drafts: "device": kernels draft and learn; "host": the drafter itself does; "none": steps
            are plain, and nothing is learnt from them.
        choice: of tokens.
    """

    batch: int
    slots: int
    size: int
    kernels: bool
    drafts: Drafts
    choice: TokenChoice = field(default_factory=TokenChoice)


class GraphStep:
    """Propose, verify, accept, observe and commit for B rows, on tensors with fixed addresses.

    A step updates everything in place: ``roots``, the cache and its lengths, the drafter's rows
    and the matrix. It can therefore be captured as one graph and replayed.

    Attributes:
        spec: what it is made for.
        size: tokens that a step verifies per row.
        most: most tokens that a step can emit per row.
    """

    def __init__(
        self,
        target: TreeTarget,
        drafter: AnyDrafter,
        spec: StepSpec,
        cache: FixedCache | None = None,
        matrix: DeviceMatrix | None = None,
    ) -> None:
        """Allocate the tensors of the step.

        Args:
            target: must have read a prompt, so that the shapes of its cache are known.
            drafter: shared with other steps.
            spec: what it is made for.
            cache: that of another step for as many rows and slots, of which only one is in use
                between ``begin`` and the end of its texts; None: a new one.
            matrix: the drafter's on the device, likewise; None: a new one.
        """
        batch, slots, kernels = spec.batch, spec.slots, spec.kernels
        self.spec = spec
        self.target = target
        device = target.device
        # The step has its own rows; the drafter with its matrix is shared.
        self.drafting: Drafting
        if spec.drafts == "none":
            self.drafting = PlainDrafting(drafter)
        elif spec.drafts == "device" and drafts_on_device(drafter, spec.size):
            from token_recycling.drafting import device as kernels_of  # imports Triton
            from token_recycling.graph.device_drafting import DeviceDrafting

            matrix = kernels_of.DeviceMatrix(drafter, device) if matrix is None else matrix
            self.drafting = DeviceDrafting(drafter, batch, slots, spec.size, matrix)
        else:
            self.drafting = HostDrafting(drafter, batch, slots, spec.size, device)
        self.size, self.most = self.drafting.size, self.drafting.max_depth + 1
        self.cache = FixedCache(target.cache, batch, slots, device) if cache is None else cache
        # The first runs compare kernels of ours with PyTorch's: on the keys of a full cache.
        self.cache.fill(self.size)
        self._operations: Any = tensors
        if kernels:
            from token_recycling.graph import kernels as operations  # imports Triton

            self._operations = operations
        self.roots = torch.zeros(batch, dtype=torch.long, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        ahead = self.most * (LAG + 1)
        self.chooser = spec.choice.chooser(ahead, target.vocab_size, device)

    def begin(self, sequences: list[Sequence], generators: list[torch.Generator]) -> None:
        """Continue ``sequences``; the last token of each has not been read yet.

        Args:
            sequences: the rows.
            generators: one per row if tokens are sampled, otherwise none.
        """
        self.cache.load(self.target.cache)
        roots = torch.tensor([sequence.tokens[-1] for sequence in sequences], device="cpu")
        self.drafting.begin([sequence.tokens[:-1] for sequence in sequences], roots)
        self.roots.copy_(roots)
        active = [sequence.active for sequence in sequences]
        self.active.copy_(torch.tensor(active, device="cpu"))
        self.chooser.begin(sequences, generators)

    def logits(self) -> Tensor:
        """Propose and verify alone; return the logits [B, n, V]."""
        self.drafting.prepare()
        return self._verify(self.drafting.propose(self.roots).only(self.active))

    def __call__(self) -> Tensor:
        """Take a step without a graph; return its summary (see ``take``)."""
        return self.take(self.run)

    def take(self, run: Callable[[], Tensor]) -> Tensor:
        """Prepare a step, take it with ``run``, which returns its output, wait, and learn.

        Returns:
            The summary on the host, int64 [B, p + 1] (see ``step_summary``).
        """
        self.drafting.prepare()
        return self.learn_from(run().cpu())

    def learn_from(self, output: Tensor) -> Tensor:
        """Learn from a step's output, which is on the host; return its summary."""
        self.drafting.learn(output)
        return output[:, : self.most + 1]

    def run(self) -> Tensor:
        """Propose, verify, accept, observe and commit.

        Returns:
            The output for the host, int64 [B, m], whose first p + 1 columns are the summary (see
            ``step_summary``).
        """
        device = self.target.device
        with torch.autocast(device.type, enabled=False):
            draft = self.drafting.propose(self.roots).only(self.active)
        logits = self._verify(draft)
        choices, failed = self.chooser(draft, logits)
        # Nothing is emitted, learnt or committed then (see ``Decoding._advance``).
        draft = draft.only(self.active & ~failed)
        accepted: Accepted
        output: Tensor
        accepted, output = self._operations.accept(draft, choices, self.roots)
        with torch.autocast(device.type, enabled=False):
            observed = self.drafting.observe(draft, logits, accepted)
        if observed is not None:
            output = torch.cat([output, observed], dim=1)
        self.chooser.advance(draft, accepted)
        self._operations.commit(self.cache, accepted.path, accepted.counts)
        return output

    def _verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node; the draft's slots follow the longest row."""
        target = self.target
        positions, self.cache.writes_to.slots, masks, paths = self._operations.layout(
            target.windows,
            self.cache.lengths,
            draft,
            self.cache.slots,
            target.max_positions,
            target.dtype,
        )
        pack_queries(masks)
        add_views(masks, target.windows, self.cache.lengths, positions, draft.ancestors, paths)
        return target.compute(draft.tokens, masks, positions, self.cache)
