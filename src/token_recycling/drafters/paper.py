"""Token Recycling as published (Luo et al., ACL 2025, arXiv 2408.08696)."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Drafter, Rows
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tree import DraftTree, TreeShape, TreeTemplate, root_only


class PaperDrafter(Drafter[Rows]):
    """Fills a static tree from the adjacency matrix; uses ids only, and new rows replace old ones.

    The node with path ``(…, r)`` is the candidate of rank r of its parent's token. After every
    forward, the top-k candidates at all nodes replace the rows of their tokens.
    """

    name = "paper"
    matrix: AdjacencyMatrix
    needs_logits = True
    capturable = True

    def __init__(
        self, matrix: AdjacencyMatrix, template: TreeTemplate, *, learn_prompts: bool = True
    ) -> None:
        """Draft from ``matrix`` in the shape of ``template``.

        Args:
            matrix: shared by all rows of a batch.
            template: the tree's shape.
            learn_prompts: also learn from prompt logits, for tokens that have no row yet. The
                paper does not specify this; for tokens with a row it gains next to nothing.

        Raises:
            TokenRecyclingError: the template uses more candidates than the matrix keeps.
        """
        template.check_k(matrix.k)
        self.matrix, self.template = matrix, template
        self.shape = TreeShape(template, matrix.device)
        self._rungs = [(above, matrix.offsets(ranks)) for above, ranks in self.shape.rungs]
        self.learn_prompts = learn_prompts

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance probabilities of the template; empty unless it is ranked."""
        return self.template.acceptance

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Select tokens without a row, each at its last occurrence."""
        return self.matrix.unseen(tokens) if self.learn_prompts else None

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Store the candidates of prompt tokens."""
        self._recycle(tokens, logits, mask)

    def propose(self, rows: Rows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Build the tree level by level by look-ups in the matrix."""
        if nodes == 1:
            return root_only(roots)
        grown = [roots[:, None].to(torch.int32)]
        for above, offsets in self._rungs:
            grown.append(self.matrix.lookup(grown[-1].index_select(1, above), offsets))
        tokens = torch.cat(grown, dim=1).long()
        if self.shape.order is not None:
            tokens = tokens[:, self.shape.order]
        # Lookups in empty rows gave NO_TOKEN, which is negative: those nodes are invalid.
        return self.shape.draft(tokens.clamp(min=0), tokens >= 0).first(nodes)

    def observe(self, rows: Rows, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Store the candidates of every node."""
        self._recycle(draft.tokens, logits, draft.valid)

    def _recycle(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        values, ids = torch.topk(logits[..., : self.matrix.vocab_size], self.matrix.k, dim=-1)
        valid = valid & values[..., 0].isfinite()  # skip overflowed logits
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), valid=valid.flatten())
