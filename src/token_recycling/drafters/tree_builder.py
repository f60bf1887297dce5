"""Best-first construction of draft trees, level by level on tensors of fixed shape."""

from __future__ import annotations

from math import ceil, log2

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from token_recycling.drafters.calibration import Calibration
from token_recycling.drafters.ngram import NgramMatch
from token_recycling.drafters.sources import NO_MATCH, ChainSource, RowSource
from token_recycling.tree import DraftTree

WIDTH = 0.4  # nodes kept per level, as a fraction of the nodes of the draft
LEVELS = 6  # levels of row candidates below the root and the chain
NEVER = float("-inf")
HOPELESS = 1e-4  # a node with a lower score is not proposed


class TreeBuilder:
    """Selects the most likely nodes; a node's score is the product of rates along its path.

    The chain is one branch from the root and forms level 0 with it. At each level, the best nodes
    are expanded by their candidates. The best nodes of all levels make the draft, best first. A
    node's score is below its parent's, so the first n nodes are a tree for any n.
    """

    def __init__(
        self,
        rows: RowSource,
        chains: ChainSource,
        calibration: Calibration,
        nodes: int,
        chain_length: int,
    ) -> None:
        """Build drafts of ``nodes`` nodes below the root, with chains of up to ``chain_length``.

        A small k may allow only fewer nodes; the attribute ``nodes`` has the actual number.
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
        self._eye[0, 0] = 0.0  # ``one_hot`` adds this entry: the root is its own parent

    def __call__(self, roots: Tensor, previous: Tensor, chain: NgramMatch) -> DraftTree:
        """Return drafts below ``roots``, int64 [B]; ``previous``, int64 [B], precedes each root."""
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
        children = children.masked_fill(ids == below[..., None], NEVER)  # already in the chain

        levels = [(tokens, self._chain_parents.expand(batch, -1), scores)]
        begin = 0  # index of the level's first node in all levels
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
        """Build the draft of the best of all nodes; tensors are [B, m] with the root first."""
        batch, n = len(tokens), self.nodes + 1
        # The root comes first: its log score is 0, all others are negative.
        best, chosen = scores.topk(n, dim=1)
        indices = torch.zeros_like(parents)
        indices.scatter_(1, chosen, torch.arange(n, device=chosen.device).expand(batch, n))
        probabilities = best.exp()
        valid = probabilities > HOPELESS
        # Invalid nodes get the root as parent, so that no parent lies outside a truncated draft.
        parents = indices.gather(1, parents.gather(1, chosen)) * valid
        # Ancestors: (identity + parents) raised to a power of at least the maximum depth.
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
