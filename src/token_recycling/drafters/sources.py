"""Where candidates come from: rows of the matrix, and a chain copied from the context.

A source gives candidates with a feature each, an index into the counts of ``Calibration``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafters.ngram import NgramMatch
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tokens import NO_TOKEN

BINS = 32  # half octaves of a float16 up to 1: its exponent and the first bit of its mantissa
TOKEN, PAIR, BEHIND = range(3)  # a token's row alone, a pair's, a token's row behind a pair's
STATES = 3  # of the chain at the node: none, from a short run, from a long one
LONG = 4  # tokens of a run that is called long
# The first of each class of runs, in tokens, and what a chain's token is expected to be worth.
RUNS = {0: 0.0, 1: 0.2, 2: 0.35, 3: 0.5, 4: 0.65, 5: 0.75, 7: 0.8, 10: 0.85, 16: 0.9}
DEPTHS = (0, 1, 2, 4, 8)  # the first of each class of depths in the chain
RANKS = 4  # of a chain's token in the row: not there, first, second, lower
NO_MATCH = -2  # equal to no candidate, NO_TOKEN neither


class RowSource:
    """Candidates from the rows of a token and of the pair that it ends.

    Feature: which row, the chain's state at the node, rank, and the probability's half octave.
    """

    def __init__(self, matrix: AdjacencyMatrix) -> None:
        """Read from ``matrix``."""
        self.matrix = matrix
        self.features = 3 * STATES * matrix.k * BINS
        kinds = torch.arange(3 * STATES * matrix.k, device=matrix.device) * BINS
        self._first = kinds.view(3, STATES, matrix.k)  # feature of each kind's first bin
        self._of_pair, self._of_token = self._first[PAIR, 0], self._first[TOKEN, 0]  # off the chain

    def expected(self) -> Tensor:
        """Expect of a candidate its probability: float32 [features], 0 where it is 0."""
        half_octaves = torch.arange(BINS, device=self.matrix.device)
        odd = (half_octaves % 2).float()
        middle = 2.0 ** (half_octaves // 2 - 15).float() * (1.25 + 0.5 * odd)
        middle = middle.clamp(max=0.999).where(half_octaves > 0, 0.0)
        return middle.repeat(3 * STATES * self.matrix.k)

    def best(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair's candidates, or the token's where the pair has none; off the chain.

        Args:
            previous: int64 [...].
            tokens: int64 [...], ``NO_TOKEN`` allowed.

        Returns:
            int32 [..., k] ids, ``NO_TOKEN`` where there is none, and their features, int64.
        """
        rows, known = self.matrix.rows(previous, tokens)
        ids, p = self.matrix.fetch(rows)
        first = torch.where(known[..., None], self._of_pair, self._of_token)
        return ids, _bins(p) + first

    def both(self, previous: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair's candidates and behind them the token's, each id once.

        Args:
            previous: int64 [...].
            tokens: int64 [...].
            state: int64 [...], of the chain.

        Returns:
            int32 [..., 2k] ids, ``NO_TOKEN`` where there is none, and their features, int64.
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
    """Return the half octave of float16 probabilities, int64; 0 is that of 0 alone."""
    return probabilities.view(torch.int16).long() >> 9


class ChainSource:
    """What followed the last tokens before (``Context.continuation``), as one branch.

    Feature: the length of the run, the depth in the chain, and the rank that the node's rows
    give to the chain's token.
    """

    features = len(RUNS) * len(DEPTHS) * RANKS

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Have features on ``device``."""
        self._runs = torch.tensor(list(RUNS), device=device)
        self._depths = torch.tensor(DEPTHS, device=device)

    def expected(self) -> Tensor:
        """Expect more of longer runs: float32 [features]."""
        rates = torch.tensor(list(RUNS.values()), dtype=torch.float32, device=self._runs.device)
        return rates.repeat_interleave(len(DEPTHS) * RANKS)

    @staticmethod
    def state(chain: NgramMatch) -> Tensor:
        """Return the chain's state at its nodes, int64 [B]."""
        return (chain.run > 0).long() + (chain.run >= LONG)

    def of(self, chain: NgramMatch, token: Tensor, depth: Tensor, candidates: Tensor) -> Tensor:
        """Return the features of the chain's tokens.

        Args:
            chain: of B rows.
            token: int64 [B, m], the chain's token below each node.
            depth: int64 [m], its depth in the chain.
            candidates: int64 [B, m, c], of the rows.
        """
        same = candidates == token[..., None]
        rank = torch.where(same.any(dim=-1), same.long().argmax(dim=-1).clamp(max=2) + 1, 0)
        run = torch.bucketize(chain.run, self._runs, right=True)[:, None] - 1
        kind = torch.bucketize(depth, self._depths, right=True) - 1
        return (run * len(DEPTHS) + kind) * RANKS + rank
