"""The decoding step as one graph: the functions used in ``decode``, without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import (
    Processors,
    accept_choices,
    greedy,
    overflowed,
    step_summary,
)
from token_recycling.drafters.base import AnyDrafter
from token_recycling.graph.drafting import HostDrafting, TracedDrafting
from token_recycling.model.attention import pack_queries
from token_recycling.model.kv_cache import FixedCache
from token_recycling.model.masks import additive_masks
from token_recycling.model.target import TreeTarget
from token_recycling.samplers import NodeSampler
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

LAG = 1  # steps by which the host may be behind


class GraphStep:
    """Propose, verify, accept, observe and commit for B rows, on tensors with fixed addresses.

    A step updates everything in place: ``roots``, the cache and its lengths, the drafter's rows
    and the matrix. It can therefore be compiled as one graph and replayed.

    Attributes:
        nodes: tokens that a step verifies per row.
        most: most tokens that a step can emit per row.
    """

    def __init__(
        self,
        target: TreeTarget,
        drafter: AnyDrafter,
        batch: int,
        slots: int,
        nodes: int | None,
        processors: list[Processors] | None = None,
    ) -> None:
        """Allocate the tensors of the step.

        Args:
            target: must have read a prompt, so that the shapes of its cache are known.
            drafter: on a GPU, must be ``capturable``.
            batch: B.
            slots: slots of the cache.
            nodes: most tokens that a step verifies per row; None: whole drafts.
            processors: logits processors of every row, for sampling; None: take the argmax.
        """
        self.target = target
        device = target.device
        # The step has its own rows; the drafter with its matrix is shared.
        self.drafting: TracedDrafting | HostDrafting
        if drafter.capturable:
            self.drafting = TracedDrafting(drafter, batch, slots, nodes, device)
        else:
            self.drafting = HostDrafting(drafter, batch, slots, nodes)
        self.nodes, self.most = self.drafting.nodes, self.drafting.max_depth + 1
        self.cache = FixedCache(target.cache, batch, slots, device)
        self.roots = torch.zeros(batch, dtype=torch.long, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self._slots = torch.arange(slots, device=device)
        self.sampler: NodeSampler | None = None
        if processors is not None:
            ahead = self.most * (LAG + 1)
            self.sampler = NodeSampler(processors, ahead, target.vocab_size, device)

    def begin(self, sequences: list[Sequence]) -> None:
        """Continue ``sequences``; the last token of each has not been read yet."""
        self.cache.take(self.target.cache)
        drafting = self.drafting
        drafting.drafter.load(drafting.rows, [sequence.tokens[:-1] for sequence in sequences])
        roots = torch.tensor([sequence.tokens[-1] for sequence in sequences], device="cpu")
        self.roots.copy_(roots)
        active = [sequence.active for sequence in sequences]
        self.active.copy_(torch.tensor(active, device="cpu"))

    def __call__(self) -> Tensor:
        """Take a step; return the output for the host, int64 [B, p + 1] (see ``step_summary``)."""
        device = self.target.device
        with torch.autocast(device.type, enabled=False):
            draft = self.drafting.propose(self.roots).only(self.active)
        logits = self._verify(draft)
        # Nothing is emitted, learnt or committed after an overflow (see ``Decoding._advance``).
        draft = draft.only(self.active & ~overflowed(logits))
        choices = greedy(logits) if self.sampler is None else self.sampler(draft.depths, logits)
        accepted = accept_choices(draft, choices)
        with torch.autocast(device.type, enabled=False):
            self.drafting.observe(draft, logits, accepted)
        self.cache.commit(accepted.path, accepted.counts)
        last = accepted.emitted.gather(1, (accepted.counts - 1).clamp(min=0)[:, None])[:, 0]
        if self.sampler is not None:
            self.sampler.chosen.add_(accepted.counts)
        self.roots.copy_(torch.where(accepted.counts > 0, last, self.roots))
        return step_summary(draft, accepted)

    def _verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node; the draft's slots follow the longest row."""
        target, n = self.target, draft.nodes
        lengths = self.cache.lengths[:, None]
        end = self.cache.lengths.max()
        self.cache.draft_slots = end + self._slots[:n]
        positions = target.positions(lengths, draft)
        node = (self._slots - end).expand(len(lengths), -1)
        drafted = (node >= 0) & (node < n)
        node = node.clamp(0, n - 1)
        above = draft.ancestors.gather(2, node[:, None].expand(-1, n, -1))
        visible = torch.where(drafted[:, None], above, (self._slots < lengths)[:, None])
        key_positions = torch.where(drafted, positions.gather(1, node), self._slots)
        masks = additive_masks(target.windows, visible, positions, key_positions, target.dtype)
        pack_queries(masks)
        output = target.model(
            input_ids=draft.tokens,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        logits: Tensor = output.logits.to(target.device)
        return logits
