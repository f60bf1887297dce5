"""Token Recycling as published (Luo et al., ACL 2025, arXiv 2408.08696)."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Drafter, Rows
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tree import DraftTree, TreeShape, TreeTemplate, root_only


class PaperDrafter(Drafter[Rows]):
    """A static tree filled from the adjacency matrix; ids only; the latest row wins.

    The node with path ``(…, r)`` is the r-th candidate of its parent's token. After every
    forward the top-k candidates of all nodes replace their tokens' rows.
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
            matrix: shared by every row of a batch.
            template: the tree's shape.
            learn_prompts: recycle the prompt's logits too, of tokens that have no row yet. The
                paper leaves this open; where there is a row, it gains next to nothing.

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
        """That of a ranked template."""
        return self.template.acceptance

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Ask for tokens without a row, each at its last occurrence."""
        return self.matrix.unseen(tokens) if self.learn_prompts else None

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Recycle a chunk of the prompts."""
        self._recycle(tokens, logits, mask)

    def propose(self, rows: Rows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Grow the tree level by level by look-ups in the matrix."""
        if nodes == 1:
            return root_only(roots)
        grown = [roots[:, None].to(torch.int32)]
        for above, offsets in self._rungs:
            grown.append(self.matrix.lookup(grown[-1].index_select(1, above), offsets))
        tokens = torch.cat(grown, dim=1).long()
        if self.shape.order is not None:
            tokens = tokens[:, self.shape.order]
        # Below a row never seen there is nothing.
        return self.shape.draft(tokens.clamp(min=0), tokens >= 0).first(nodes)

    def observe(self, rows: Rows, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Recycle the candidates of every node."""
        self._recycle(draft.tokens, logits, draft.valid)

    def _recycle(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        values, ids = torch.topk(logits[..., : self.matrix.vocab_size], self.matrix.k, dim=-1)
        valid = valid & values[..., 0].isfinite()  # where logits have overflowed nothing is ranked
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), valid=valid.flatten())
