"""Drafts cut to the size that pays: on this machine, for this text, at this moment."""

from __future__ import annotations

from math import log
from time import perf_counter

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.costs import CostCurve
from token_recycling.drafters.acceptance import Acceptance
from token_recycling.drafters.base import Drafter
from token_recycling.drafters.pace import Pace
from token_recycling.errors import TokenRecyclingError
from token_recycling.tree import DraftTree

REVIEW = 8  # steps from one choice of the size to the next
BETTER = 0.02  # by how much another size must promise to be faster (of a logarithm)
OFTEN, SELDOM, RARELY = 3, 48, 256  # steps from one that measures a size to the next
HOPELESS = 0.3  # a size that promises less than the best by this is measured rarely


class BudgetDrafter(Drafter):
    """Takes the first n nodes of another drafter's drafts, n by expected tokens per second.

    Expected tokens come from comparing whole drafts with the text that followed
    (``Acceptance``), costs from a curve that the steps themselves correct (``Pace``). A size of 1
    is plain decoding: where no draft pays, none is verified.
    """

    def __init__(
        self, drafter: Drafter, costs: CostCurve, device: torch.device | str = "cpu"
    ) -> None:
        """Cut the drafts of ``drafter``, which must have ``shares``, by ``costs``.

        Raises:
            TokenRecyclingError: the drafter's nodes do not stand in the order of their use.
        """
        if not drafter.shares:
            raise TokenRecyclingError(f"drafts of {drafter.name} cannot be cut; name a tree")
        self.drafter, self.costs = drafter, costs
        self.name = drafter.name
        self.needs_logits = drafter.needs_logits
        self.matrix = getattr(drafter, "matrix", None)
        most = len(drafter.shares) + 1
        self.sizes = sorted({most, *(size for size in costs.sizes if size < most)})
        self.acceptance = Acceptance(drafter.shares, device)
        # On a CPU the loop drops the nodes that stand for nothing.
        self._compacts = torch.device(device).type == "cpu"
        self._rows, self._context, self._steps = 1, 0.0, 0
        self._pace: Pace | None = None
        self._usual = self._best()
        self._pace = Pace(len(self.sizes), self._usual, trusted=costs.measured)
        self._size, self._begun = self._usual, 0.0
        self._measured = [0] * len(self.sizes)  # the step that last measured each size

    @property
    def size(self) -> int:
        """Tokens that a usual step verifies at most, the root included."""
        return self.sizes[self._usual]

    def start(self, prompts: list[list[int]]) -> None:
        """Begin a batch of sequences."""
        self.drafter.start(prompts)
        self.acceptance.start()
        self._rows = len(prompts)
        self._context = float(max(map(len, prompts)))

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Ask the drafter, unless it will hardly draft."""
        return None if self.size == 1 else self.drafter.wants(tokens)

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        """Pass a chunk of the prompts on."""
        self.drafter.prime(tokens, logits, valid)

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the beginning of the whole draft."""
        self._begun = perf_counter()
        self._steps += 1
        if self._steps % REVIEW == 0:
            self._usual = self._best()
        unusual = self._unusual()
        self._size = self._usual if unusual is None else unusual
        whole = self.drafter.propose(roots)
        self.acceptance.watch(whole)
        return whole.first(self.sizes[self._size])

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Let the drafter learn, and note what the step took and emitted."""
        self.drafter.observe(draft, logits, accepted)
        self.acceptance.follow(accepted)
        self._context += max(map(len, accepted.tokens))
        seconds = perf_counter() - self._begun
        expected = self.costs.at(draft.tokens.numel(), self._context)
        assert self._pace is not None
        self._pace.note(self._size, seconds, expected, self._size == self._usual)

    def speeds(self) -> tuple[list[float], list[float]]:
        """Per size: the expected MAT, and the expected tokens per unit of the cost curve."""
        mats, nodes = self.acceptance.expected(self.sizes)
        speeds = []
        for size, mat in enumerate(mats):
            tokens = nodes[size] if self._compacts else self.sizes[size]
            cost = self.costs.at(self._rows * tokens, self._context)
            speeds.append(mat / cost)
        return mats, speeds

    def _best(self) -> int:
        """Index of the size to go on with."""
        _, speeds = self.speeds()
        promised = [log(speed) for speed in speeds]
        self._now = promised
        if self._pace is not None:
            self._now = [p - self._pace.correction(size) for size, p in enumerate(promised)]
        self._favourite = promised.index(max(promised))
        best = self._now.index(max(self._now))
        if self._pace is None or self._now[best] > self._now[self._usual] + BETTER:
            return best
        return self._usual

    def _unusual(self) -> int | None:
        """Index of a size to measure in this step, if it is time for one.

        Plain decoding, the neighbours of the usual size and the one that the curve alone would
        take: often until they are known, then seldom, and rarely where there is little hope.
        """
        if self._steps - max(self._measured) < OFTEN:
            return None
        others = {0, self._usual - 1, self._usual + 1, self._favourite} - {self._usual}
        due = [
            size
            for size in others
            if 0 <= size < len(self.sizes)
            and self._steps - self._measured[size] >= self._pause(size)
        ]
        if not due:
            return None
        size = min(due, key=self._measured.__getitem__)
        self._measured[size] = self._steps
        return size

    def _pause(self, size: int) -> int:
        """Steps from one measurement of ``size`` to the next."""
        assert self._pace is not None
        if not self._pace.settled(size):
            return OFTEN
        hopeful = self._now[size] > max(self._now) - HOPELESS
        return SELDOM if hopeful or not size else RARELY
