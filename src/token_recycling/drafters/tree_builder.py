"""Best-first growth of a draft tree, level by level on tensors of fixed shape."""

from __future__ import annotations

from math import ceil, log2

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from token_recycling.drafters.calibration import Calibration
from token_recycling.drafters.ngram import NgramMatch
from token_recycling.drafters.sources import NO_MATCH, ChainSource, RowSource
from token_recycling.tree import DraftTree

WIDTH = 0.4  # nodes of a level that grow on, per node of the draft
LEVELS = 6  # of rows, below the root and below every node of the chain
NEVER = float("-inf")
HOPELESS = 1e-4  # a node less likely to be right is not proposed


class TreeBuilder:
    """Takes the ``nodes`` most likely nodes, a node's score being the product along its path.

    The chain is one branch from the root, known at once. Level by level the best nodes get their
    candidates, and of all of them the best make the draft, best first: a node's score is below
    its parent's, so any first n of them are a tree.
    """

    def __init__(
        self,
        rows: RowSource,
        chains: ChainSource,
        calibration: Calibration,
        nodes: int,
        chain_length: int,
    ) -> None:
        """Grow drafts of ``nodes`` nodes below the root, with chains of ``chain_length``.

        With few candidates a token the levels may hold fewer; ``nodes`` says how many.
        """
        self.rows, self.chains, self.calibration = rows, chains, calibration
        self.chain_length = chain_length
        self.width = max(ceil(WIDTH * nodes), min(nodes, 16))
        k = rows.matrix.k
        levels = [chain_length, min(self.width, 2 * k * (chain_length + 1))]
        while len(levels) <= LEVELS:
            levels.append(min(self.width, k * levels[-1]))
        self.nodes = nodes = min(nodes, sum(levels))
        self.max_depth = min(chain_length + LEVELS, nodes)
        device = calibration.logs.device
        self._chain_depths = torch.arange(chain_length + 1, device=device)
        self._chain_parents = (self._chain_depths - 1).clamp(min=0)
        self._eye = torch.eye(nodes + 1, dtype=torch.float32, device=device)
        self._eye[0, 0] = 0.0  # the root is its own parent, and is counted as such

    def __call__(self, roots: Tensor, previous: Tensor, chain: NgramMatch) -> DraftTree:
        """Return the draft below ``roots`` int64 [B], which stand behind ``previous``."""
        batch, logs = len(roots), self.calibration.logs
        # Level 0: the root and the chain below it.
        tokens = torch.cat([roots[:, None], chain.tokens], dim=1)
        before = torch.cat([previous[:, None], tokens[:, :-1]], dim=1)
        below = torch.cat([chain.tokens.masked_fill(~chain.valid, NO_MATCH), _none(roots)], dim=1)
        has = below != NO_MATCH
        state = ChainSource.state(chain)[:, None] * has
        ids, features = self.rows.both(before, tokens, state)
        of_chain = self.chains.of(chain, below, self._chain_depths, ids) + self.rows.features
        steps = logs[of_chain].masked_fill(~has, NEVER)[:, :-1].cumsum(dim=1)
        scores = pad(steps, (1, 0))
        children = scores[..., None] + logs[features]
        children = children.masked_fill(ids == below[..., None], NEVER)  # it stands in the chain

        levels = [(tokens, self._chain_parents.expand(batch, -1), scores)]
        begin = 0  # of the level in all of them
        for level in range(LEVELS):
            width = min(self.width, children[0].numel())
            best, index = children.flatten(1).topk(width, dim=1)
            above = index // ids.shape[-1]
            before, begin, parents = tokens.gather(1, above), begin + tokens.shape[1], above + begin
            tokens = ids.flatten(1).gather(1, index).long()
            levels.append((tokens, parents, best))
            if level + 1 < LEVELS:
                ids, features = self.rows.best(before, tokens)
                children = best[..., None] + logs[features]
        return self._draft(*(torch.cat(parts, dim=1) for parts in zip(*levels)))

    def _draft(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> DraftTree:
        """Choose the best of all nodes [B, m]; the root is the first of them."""
        batch, n = len(tokens), self.nodes + 1
        # The root's score is 0 and no other's is, so it comes first.
        best, chosen = scores.topk(n, dim=1)
        indices = torch.zeros_like(parents)
        indices.scatter_(1, chosen, torch.arange(n, device=chosen.device).expand(batch, n))
        probabilities = best.exp()
        valid = probabilities > HOPELESS
        # What is not proposed hangs below the root, so that cutting finds it no parent too far.
        parents = indices.gather(1, parents.gather(1, chosen)) * valid
        # Ancestors: (identity + parents) to a power that windows the root from every depth.
        paths = self._eye + one_hot(parents, n)
        ancestors = torch.linalg.matrix_power(paths, 2 ** ceil(log2(self.max_depth))) > 0
        return DraftTree(
            tokens.gather(1, chosen).clamp(min=0),
            parents,
            ancestors.sum(dim=2) - 1,
            ancestors,
            valid,
            self.max_depth,
            probabilities,
        )


def _none(roots: Tensor) -> Tensor:
    return torch.full_like(roots[:, None], NO_MATCH)
