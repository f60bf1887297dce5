"""Token Recycling as published (Luo et al., ACL 2025, arXiv 2408.08696)."""

from __future__ import annotations

import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import Drafter, DrafterState
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.kernels import template as kernels
from token_recycling.drafting.matrix import AdjacencyMatrix, last_occurrences
from token_recycling.drafting.templates import TreeShape, TreeTemplate


class PaperDrafter(Drafter[DrafterState]):
    """Fills a static tree from the adjacency matrix; uses ids only, and new rows replace old ones.

    The node with path ``(…, r)`` is the candidate of rank r of its parent's token. After every
    forward, the top-k candidates at all nodes replace the rows of their tokens.
    """

    name = "paper"
    matrix: AdjacencyMatrix

    def __init__(
        self, matrix: AdjacencyMatrix, template: TreeTemplate, *, prompts: str = "whole"
    ) -> None:
        """Draft from ``matrix`` in the shape of ``template``.

        Args:
            matrix: shared by all rows of a batch.
            template: the tree's shape.
            prompts: see ``Drafter.prompts``.

        Raises:
            TokenRecyclingError: the template uses more candidates than the matrix keeps.
        """
        template.check_k(matrix.k)
        self.matrix, self.template = matrix, template
        self.shape = TreeShape(template, "cpu")
        self.prompts = prompts

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance probabilities of the template; empty unless it is ranked."""
        return self.template.acceptance

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Select every token at its last occurrence, whose row replaces those before."""
        return last_occurrences(tokens.cpu())

    def learn_prompt(self, tokens: Tensor, candidates: Candidates, mask: Tensor) -> None:
        """Store the candidates of prompt tokens."""
        self._recycle(tokens, candidates, mask)

    def propose(self, state: DrafterState, roots: Tensor, size: int | None = None) -> DraftTree:
        """Fill the tree by look-ups in the matrix."""
        if size == 1:
            return root_only(roots)
        tokens = torch.empty((len(roots), self.shape.size), dtype=torch.long, device="cpu")
        tokens[:, 0] = roots
        valid = torch.empty_like(tokens, dtype=torch.bool)
        kernels.fill_template(
            self.matrix.candidates.numpy(),
            self.shape.parents.numpy(),
            self.shape.ranks.numpy(),
            tokens.numpy(),
            valid.numpy(),
        )
        return self.shape.draft(tokens, valid).first(size)

    def observe(
        self, state: DrafterState, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Store the candidates of every node."""
        self._recycle(draft.tokens, candidates, draft.valid)

    def _recycle(self, tokens: Tensor, candidates: Candidates, valid: Tensor) -> None:
        kernels.replace_rows(
            as_array(tokens.cpu().flatten()),
            (as_array(valid.cpu()) & candidates.finite).reshape(-1),
            candidates.ids.reshape(-1, self.k),
            self.matrix.candidates.numpy(),
            self.matrix.probabilities.view(torch.uint16).numpy(),
        )
