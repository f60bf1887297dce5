"""Sources of candidates: rows of the matrix, and a chain copied from the context.

A source gives every candidate a feature, an index into the counts of ``Calibration``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafters.ngram import NgramMatch
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tokens import NO_TOKEN

BINS = 32  # half octaves of float16 values up to 1: exponent and first mantissa bit
# Kinds of row: a token's where the pair has none, a pair's, a token's where the pair has one.
TOKEN, PAIR, BEHIND = range(3)
STATES = 3  # chain state at a node: no chain, one from a short run, one from a long run
LONG = 4  # length from which a run is long, in tokens
# Lower bound of each class of run lengths -> expected rate at which a chain token is right.
RUNS = {0: 0.0, 1: 0.2, 2: 0.35, 3: 0.5, 4: 0.65, 5: 0.75, 7: 0.8, 10: 0.85, 16: 0.9}
DEPTHS = (0, 1, 2, 4, 8)  # lower bound of each class of depths in the chain
RANKS = 4  # rank of a chain token in the node's row: absent, first, second, lower
NO_MATCH = -2  # differs from every candidate and from NO_TOKEN


class RowSource:
    """Candidates from the rows of a token and of the pair that ends with it.

    Feature: kind of row, chain state at the node, rank, and half octave of the probability.
    """

    def __init__(self, matrix: AdjacencyMatrix) -> None:
        """Read from ``matrix``."""
        self.matrix = matrix
        self.features = 3 * STATES * matrix.k * BINS
        kinds = torch.arange(3 * STATES * matrix.k, device=matrix.device) * BINS
        self._first = kinds.view(3, STATES, matrix.k)  # feature of the first bin
        self._of_pair, self._of_token = self._first[PAIR, 0], self._first[TOKEN, 0]  # off the chain

    def expected(self) -> Tensor:
        """Return expected rates float32 [features]: midpoints of half octaves, 0 for bin 0."""
        half_octaves = torch.arange(BINS, device=self.matrix.device)
        odd = (half_octaves % 2).float()
        middle = 2.0 ** (half_octaves // 2 - 15).float() * (1.25 + 0.5 * odd)
        middle = middle.clamp(max=0.999).where(half_octaves > 0, 0.0)
        return middle.repeat(3 * STATES * self.matrix.k)

    def best(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair's candidates, or the token's if the pair has no row, off the chain.

        Args:
            previous: int64 [...].
            tokens: int64 [...], ``NO_TOKEN`` allowed.

        Returns:
            Ids int32 [..., k], padded with ``NO_TOKEN``, and their features, int64 [..., k].
        """
        rows, known = self.matrix.rows(previous, tokens)
        ids, p = self.matrix.fetch(rows)
        first = torch.where(known[..., None], self._of_pair, self._of_token)
        return ids, _bins(p) + first

    def both(self, previous: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair's candidates followed by the token's, without duplicates.

        Args:
            previous: int64 [...].
            tokens: int64 [...].
            state: int64 [...], the chain state at each node.

        Returns:
            Ids int32 [..., 2k], ``NO_TOKEN`` where there is none, and their features, int64
            [..., 2k].
        """
        rows, known = self.matrix.rows(previous, tokens)
        ids, p = self.matrix.fetch(torch.stack([torch.where(known, rows, 0), tokens + 1], dim=-1))
        of_pair, of_token = ids.unbind(-2)
        twice = (of_pair[..., :, None] == of_token[..., None, :]).any(dim=-2)
        ids = torch.cat([of_pair, of_token.masked_fill(twice, NO_TOKEN)], dim=-1)
        bins = _bins(p).flatten(-2)
        bins[..., self.matrix.k :].masked_fill_(twice, 0)
        behind = self._first[known.long() * BEHIND, state]
        return ids, bins + torch.cat([self._first[PAIR, state], behind], dim=-1)


def _bins(probabilities: Tensor) -> Tensor:
    """Return the half octaves of float16 probabilities, int64; bin 0 is for (almost) 0."""
    return probabilities.view(torch.int16).long() >> 9


class ChainSource:
    """The chain: the tokens of an ``NgramMatch``, as one branch from the root.

    Feature: length of the run, depth in the chain, and rank of the chain token among the
    candidates of the node's rows.
    """

    features = len(RUNS) * len(DEPTHS) * RANKS

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Compute features on ``device``."""
        self._runs = torch.tensor(list(RUNS), device=device)
        self._depths = torch.tensor(DEPTHS, device=device)

    def expected(self) -> Tensor:
        """Return expected rates float32 [features], which rise with the length of the run."""
        rates = torch.tensor(list(RUNS.values()), dtype=torch.float32, device=self._runs.device)
        return rates.repeat_interleave(len(DEPTHS) * RANKS)

    @staticmethod
    def state(chain: NgramMatch) -> Tensor:
        """Return the chain state at the nodes of the chain, int64 [B]."""
        return (chain.run > 0).long() + (chain.run >= LONG)

    def of(self, chain: NgramMatch, token: Tensor, depth: Tensor, candidates: Tensor) -> Tensor:
        """Return the features of chain tokens, int64 [B, m].

        Args:
            chain: the match of B rows.
            token: int64 [B, m], the chain token below each node.
            depth: int64 [m], its depth in the chain.
            candidates: int [B, m, c], the candidates of the node's rows.
        """
        same = candidates == token[..., None]
        rank = torch.where(same.any(dim=-1), same.long().argmax(dim=-1).clamp(max=2) + 1, 0)
        run = torch.bucketize(chain.run, self._runs, right=True)[:, None] - 1
        kind = torch.bucketize(depth, self._depths, right=True) - 1
        return (run * len(DEPTHS) + kind) * RANKS + rank
