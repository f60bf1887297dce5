"""Compilation of everything that a step runs on the host, before the first step needs it."""

from __future__ import annotations

from functools import lru_cache

import torch

from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.draft import root_only
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.drafting.templates import TreeTemplate

V, K = 8, 2


@lru_cache
def compile_kernels() -> None:
    """Compile the drafters and the acceptance: seconds at first, later 0.3 s per process."""
    with ordinary_tensors():
        _take_steps(AdaptiveDrafter(AdjacencyMatrix(V, K), 3, pairs=3, triples=3))
        _take_steps(PaperDrafter(AdjacencyMatrix(V, K), TreeTemplate.chain(2)))
        _take_steps(PromptLookupDrafter())


def _take_steps(drafter: AnyDrafter) -> None:
    """Draft and learn, with drafts and without."""
    sequence, roots = Sequence([1, 2, 1, 2]), torch.tensor([2], device="cpu")
    rows = drafter.new_state(1)
    drafter.load(rows, [[1, 2, 1]])
    for nodes in (None, 1):
        draft = drafter.propose(rows, roots, nodes)
        logits = torch.zeros((1, draft.size, V), dtype=torch.float32, device="cpu")
        accepted, _ = GreedyAcceptor()(draft, logits, [sequence])
        drafter.observe(rows, draft, best_candidates(logits, drafter.k), accepted)
    GreedyAcceptor()(root_only(roots), logits, [sequence])
