"""The draft of a step: a tree of tokens per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class DraftTree:
    """The draft of one step for B rows; node 0 of each row is its root.

    Attributes:
        tokens: int64 [B, n].
        parents: int64 [B, n]; a parent precedes its children; the root is its own parent.
        depths: int64 [B, n], 0 for the root.
        ancestors: bool [B, n, n]; ``[b, i, j]`` is True if j is i or an ancestor of i.
        valid: bool [B, n]; an invalid node is padding and never accepted. All nodes below an
            invalid node must be invalid too.
        max_depth: upper bound of ``depths``.
        scores: float32 [B, n], the probability that each node is right, in descending order; None
            if the drafter gives none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    valid: Tensor
    max_depth: int
    scores: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of nodes per row, including the root."""
        return self.tokens.shape[1]

    def pack(self) -> Tensor:
        """Return everything but the scores as one tensor, int64 [B, 4 + n, n]."""
        parts = [self.tokens, self.parents, self.depths, self.valid.long()]
        return torch.cat([torch.stack(parts, dim=1), self.ancestors.long()], dim=1).contiguous()

    @classmethod
    def unpack(cls, packed: Tensor, max_depth: int) -> DraftTree:
        """Return the draft of a tensor made by ``pack``."""
        tokens, parents, depths, valid = packed[:, :4].unbind(dim=1)
        return cls(tokens, parents, depths, packed[:, 4:].bool(), valid.bool(), max_depth)

    def to(self, device: torch.device | str) -> DraftTree:
        """Return the draft on ``device``, copied in one transfer; the scores stay behind."""
        if self.tokens.device == torch.device(device):
            return self
        return self.unpack(self.pack().to(device), self.max_depth)

    def only(self, rows: Tensor) -> DraftTree:
        """Return the draft with all nodes invalid in rows where ``rows`` (bool [B]) is False."""
        return replace(self, valid=self.valid & rows[:, None])

    def up_to(self, counts: Tensor) -> DraftTree:
        """Return the draft with all but the first ``counts`` (int64 [B]) nodes of a row invalid."""
        included = torch.arange(self.size, device=self.tokens.device) < counts[:, None]
        return replace(self, valid=self.valid & included)

    def down_to(self, depths: list[int]) -> DraftTree:
        """Return the draft with all nodes of row b that are deeper than ``depths[b]`` invalid."""
        if min(depths) >= self.max_depth:
            return self
        deepest = torch.tensor(depths, device=self.depths.device)[:, None]
        return replace(self, valid=self.valid & (self.depths <= deepest))

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        """Return the draft with every tensor changed."""
        return DraftTree(
            change(self.tokens),
            change(self.parents),
            change(self.depths),
            change(self.ancestors),
            change(self.valid),
            self.max_depth,
            None if self.scores is None else change(self.scores),
        )

    def first(self, size: int | None) -> DraftTree:
        """Return the draft of the first ``size`` nodes, including the root; None: all."""
        if size is None or size >= self.size:
            return self
        part = self._with_tensors(lambda x: x[:, :size] if x.dim() == 2 else x[:, :size, :size])
        return replace(part, max_depth=min(self.max_depth, size - 1))

    def select(self, rows: list[int]) -> DraftTree:
        """Return the drafts of these rows."""
        return self._with_tensors(lambda x: x[rows])

    def padded(self, size: int) -> DraftTree:
        """Return the draft with invalid nodes appended, up to ``size`` nodes."""
        more = size - self.size
        if more <= 0:
            return self
        return self._with_tensors(lambda x: pad(x, (0, more) * (x.dim() - 1)))

    def compact(self) -> DraftTree:
        """Drop the nodes that are invalid in every row.

        This saves time on a CPU, where every verified node costs time, above all with a cold
        matrix. Shapes of the result depend on the data, so graph steps do not use it.
        """
        if self.size == 1 or bool(self.valid.all()):
            return self
        used = self.valid.any(dim=0)
        used[0] = True
        if bool(used.all()):
            return self
        nodes = used.nonzero()[:, 0]
        renumbered = (used.cumsum(0) - 1).clamp(min=0)
        part = self._with_tensors(
            lambda x: x[:, nodes] if x.dim() == 2 else x[:, nodes][..., nodes]
        )
        # A node that is invalid in this row may have lost its parent; any index will do then.
        return replace(part, parents=renumbered[part.parents])


def chains(tokens: Tensor) -> DraftTree:
    """Return single-branch drafts of ``tokens``, int64 [B, n], the roots first."""
    batch, n = tokens.shape
    depths = torch.arange(n, device=tokens.device)
    ancestors = depths[:, None] >= depths
    return DraftTree(
        tokens,
        (depths - 1).clamp(min=0).expand(batch, n),
        depths.expand(batch, n),
        ancestors.expand(batch, n, n),
        torch.ones_like(tokens, dtype=torch.bool),
        n - 1,
    )


def root_only(tokens: Tensor) -> DraftTree:
    """Return root-only drafts of ``tokens`` (int64 [B]), for a step of plain decoding."""
    zeros = torch.zeros((len(tokens), 1), dtype=torch.long, device=tokens.device)
    valid = torch.ones_like(zeros, dtype=torch.bool)
    return DraftTree(tokens[:, None], zeros, zeros, valid[:, :, None], valid, 0)
