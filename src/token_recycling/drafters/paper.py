"""Token Recycling as published (Luo et al., ACL 2025, arXiv 2408.08696)."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.adjacency import AdjacencyMatrix
from token_recycling.drafters.base import Drafter
from token_recycling.tree import DraftTree, TreeShape, TreeTemplate


class PaperDrafter(Drafter):
    """A static tree filled from the adjacency matrix; ids only; the latest row wins.

    The node with path ``(…, r)`` is the r-th candidate of its parent's token. After every
    forward the top-k candidates of all nodes replace their tokens' rows.
    """

    name = "paper"
    needs_logits = True
    fixed_shapes = True

    def __init__(
        self, matrix: AdjacencyMatrix, template: TreeTemplate, *, prime_prompt: bool = True
    ) -> None:
        """Draft from ``matrix`` in the shape of ``template``.

        Args:
            matrix: shared by every row of a batch.
            template: the tree's shape.
            prime_prompt: recycle the prompt's logits too, of tokens that have no row yet. The
                paper leaves this open; where there is a row, it gains next to nothing.

        Raises:
            TokenRecyclingError: the template uses more candidates than the matrix keeps.
        """
        template.check_k(matrix.k)
        self.matrix, self.template = matrix, template
        self.shape = TreeShape(template, matrix.device)
        self._rungs = [(above, matrix.offsets(ranks)) for above, ranks in self.shape.rungs]
        self.prime_prompt = prime_prompt

    @property
    def shares(self) -> tuple[float, ...]:
        """Those of a ranked template."""
        return self.template.shares

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Want the tokens without a row, each where it stands last."""
        return self.matrix.unseen(tokens) if self.prime_prompt else None

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        """Recycle a chunk of the prompts."""
        self._recycle(tokens, logits, valid)

    def propose(self, roots: Tensor) -> DraftTree:
        """Grow the tree level by level by look-ups in the matrix."""
        grown = [roots[:, None].to(torch.int32)]
        for above, offsets in self._rungs:
            grown.append(self.matrix.lookup(grown[-1].index_select(1, above), offsets))
        tokens = torch.cat(grown, dim=1).long()
        if self.shape.order is not None:
            tokens = tokens[:, self.shape.order]
        # Below a row never seen there is nothing.
        return self.shape.draft(tokens.clamp(min=0), tokens >= 0)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Recycle the candidates of every node."""
        self._recycle(draft.tokens, logits, draft.valid)

    def _recycle(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        values, ids = torch.topk(logits[..., : self.matrix.vocab_size], self.matrix.k, dim=-1)
        valid = valid & values[..., 0].isfinite()  # where logits have overflowed nothing is ranked
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), valid=valid.flatten())
