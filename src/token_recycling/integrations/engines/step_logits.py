"""The target's logits in a step of an engine; every request has its own number of nodes."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np
from torch import Tensor

from token_recycling.drafting.candidates import Candidates, best_candidates


class StepLogits:
    """Logits at the root and the nodes of each request, concatenated.

    Attributes:
        logits: [sum of counts, V].
        counts: logits vectors of each request.
    """

    def __init__(self, logits: Tensor, counts: list[int]) -> None:
        """Keep ``logits``, which nobody may change before the last call."""
        self.logits, self.counts = logits, counts
        self._best: dict[tuple[int, int], Candidates] = {}

    @cached_property
    def starts(self) -> list[int]:
        """Index of each request's first vector."""
        return [0, *accumulate(self.counts)][:-1]

    def best(self, k: int, vocabulary: int) -> Candidates:
        """Return the k best of the first ``vocabulary`` tokens after every node, [sum of counts].

        Computed once.
        """
        key = (k, vocabulary)
        if key not in self._best:
            self._best[key] = best_candidates(self.logits[:, :vocabulary], k)
        return self._best[key]

    def best_padded(self, rows: list[int], sizes: list[int], k: int, vocabulary: int) -> Candidates:
        """Return ``best`` at the first ``sizes`` of ``rows``, [B, n]; padding is arbitrary."""
        best = self.best(k, vocabulary)
        whole = sizes == self.counts and min(sizes) == max(sizes)
        if whole and rows == list(range(len(rows))):
            shape = (len(rows), -1)
            ids, p, finite = best
            return Candidates(ids.reshape(*shape, k), p.reshape(*shape, k), finite.reshape(shape))
        starts, last = np.array([self.starts[row] for row in rows]), np.array(sizes) - 1
        return best.at(starts[:, None] + np.minimum(np.arange(max(sizes)), last[:, None]))
