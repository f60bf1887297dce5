"""The decoding step as one graph: verification, acceptance and commit without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from token_recycling.decoding.accept import Processors, greedy, overflowed
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import DraftTree
from token_recycling.graph import tensors
from token_recycling.graph.chooser import NodeChooser
from token_recycling.graph.drafting import LAG, make_drafting
from token_recycling.model.attention import add_views, pack_queries
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.target import TreeTarget


class GraphStep:
    """Propose, verify, accept, observe and commit for B rows, on tensors with fixed addresses.

    A step updates everything in place: ``roots``, the cache and its lengths, the drafter's rows
    and the matrix. It can therefore be compiled as one graph and replayed.

    Attributes:
        size: tokens that a step verifies per row.
        most: most tokens that a step can emit per row.
    """

    def __init__(
        self,
        target: TreeTarget,
        drafter: AnyDrafter,
        batch: int,
        slots: int,
        size: int | None,
        processors: list[Processors] | None = None,
        cache: FixedCache | None = None,
        *,
        sampled: bool = False,
        kernels: bool,
    ) -> None:
        """Allocate the tensors of the step.

        Args:
            target: must have read a prompt, so that the shapes of its cache are known.
            drafter: shared with other steps.
            batch: B.
            slots: slots of the cache.
            size: most tokens that a step verifies per row; None: whole drafts.
            processors: logits processors of every row (see ``can_choose``); None: there are none,
                and the argmax is taken.
            cache: that of another step for as many rows and slots, of which only one is in use
                between ``begin`` and the end of its texts; None: a new one.
            sampled: sample with the processed logits instead of taking the argmax.
            kernels: use Triton kernels, which draft on the device if the drafter has some.
        """
        self.target = target
        device = target.device
        # The step has its own rows; the drafter with its matrix is shared.
        self.drafting = make_drafting(drafter, batch, slots, size, device, kernels=kernels)
        self.size, self.most = self.drafting.size, self.drafting.max_depth + 1
        self.cache = FixedCache(target.cache, batch, slots, device) if cache is None else cache
        # The first runs choose between kernels, by results and times: of a full cache.
        self.cache.fill(self.size)
        self._operations: Any = tensors
        if kernels:
            from token_recycling.graph import kernels as operations  # imports Triton

            self._operations = operations
        self.roots = torch.zeros(batch, dtype=torch.long, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self.chooser: NodeChooser | None = None
        if processors is not None:
            ahead = self.most * (LAG + 1) if sampled else 0
            self.chooser = NodeChooser(processors, ahead, target.vocab_size, device)

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
        if self.chooser is not None:
            self.chooser.begin(sequences, generators)

    def logits(self) -> Tensor:
        """Propose and verify alone; return the logits [B, n, V]."""
        self.drafting.prepare()
        return self._verify(self.drafting.propose(self.roots).only(self.active))

    def __call__(self) -> Tensor:
        """Take a step without a graph; return its summary (see ``take``)."""
        return self.take(self.run)

    def run(self) -> Tensor:
        """Run the step's operations; return the output (see ``advance``)."""
        return self.finish(*self.advance())

    def take(self, run: Callable[[], Tensor]) -> Tensor:
        """Take a step with ``run``, which returns its output, and wait for it.

        Returns:
            The summary on the host, int64 [B, p + 1] (see ``step_summary``).
        """
        self.drafting.prepare()
        return self.read(run().cpu())

    def read(self, output: Tensor) -> Tensor:
        """Learn from a step's output on the host; return its summary."""
        self.drafting.learn(output)
        return output[:, : self.most + 1]

    def finish(self, output: Tensor, path: Tensor, counts: Tensor) -> Tensor:
        """Commit the accepted nodes and return the output; not compiled, but captured.

        A compiled function may work on copies of the cache and write them back at its end, whereas
        the kernel of the commit writes to addresses.
        """
        self._operations.commit(self.cache, path, counts)
        return output

    def advance(self) -> tuple[Tensor, Tensor, Tensor]:
        """Propose, verify, accept and observe.

        Returns:
            The output for the host int64 [B, m], whose first p + 1 columns are the summary (see
            ``step_summary``); the paths int64 [B, p]; and the counts int64 [B].
        """
        device = self.target.device
        with torch.autocast(device.type, enabled=False):
            draft = self.drafting.propose(self.roots).only(self.active)
        logits = self._verify(draft)
        failed = overflowed(logits)
        if self.chooser is None:
            choices = greedy(logits)
        else:
            choices, wrong = self.chooser(draft, logits)
            failed = failed | wrong
        # Nothing is emitted, learnt or committed then (see ``Decoding._advance``).
        draft = draft.only(self.active & ~failed)
        accepted, output = self._operations.accept(draft, choices, self.roots)
        with torch.autocast(device.type, enabled=False):
            observed = self.drafting.observe(draft, logits, accepted)
        if observed is not None:
            output = torch.cat([output, observed], dim=1)
        if self.chooser is not None:
            self.chooser.advance(draft, accepted)
        return output, accepted.path, accepted.counts

    def _verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node; the draft's slots follow the longest row."""
        target = self.target
        positions, self.cache.writes_to.slots, masks = self._operations.layout(
            target.windows,
            self.cache.lengths,
            draft,
            self.cache.slots,
            target.max_positions,
            target.dtype,
        )
        pack_queries(masks)
        add_views(masks, target.windows, self.cache.lengths, positions, draft.ancestors)
        output = target.model(
            input_ids=draft.tokens,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{target.cache_name: self.cache},
        )
        logits: Tensor = output.logits.to(target.device)
        return logits
