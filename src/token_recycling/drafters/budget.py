"""Drafts cut to the size that pays: on this machine, for this text, at this moment."""

from __future__ import annotations

from math import exp, inf
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling.accept import Accepted
from token_recycling.costs import CostCurve
from token_recycling.drafters.acceptance import Acceptance
from token_recycling.drafters.base import Drafter
from token_recycling.drafters.pace import KNOWN, Pace
from token_recycling.errors import TokenRecyclingError
from token_recycling.tree import DraftTree

REVIEW = 8  # steps for which the prices by the curve hold
OFTEN, SELDOM, RARELY = 3, 64, 512  # steps from one that measures a size to the next
HOPELESS = 0.3  # a size that promises less than the best by this share is measured rarely
MEMORY = 50.0  # steps after which an old one counts 1/e in the speed reached
PATIENCE = 4  # drafts refused in a row before one is not even grown
LONGEST_REST = 15  # steps of plain decoding from one look at a draft to the next


class BudgetDrafter(Drafter):
    """Takes the first n nodes of another drafter's drafts, n by expected tokens per second.

    Expected tokens are the sum of a draft's own scores, or, where it has none, come from
    comparing whole drafts with the text that followed (``Acceptance``); costs come from a curve
    that the steps themselves correct (``Pace``). A size of 1 is plain decoding: where no draft
    pays, none is verified.
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
        self._ends = torch.tensor(self.sizes, device=device) - 1
        self._prices: dict[float, float] = {}  # cost of a step by tokens, at this context
        self._ratios = self.acceptance.ratios(self.sizes)
        mats, speeds = self.speeds()
        best = speeds.index(max(speeds))
        self._pace = Pace(len(self.sizes), best, trusted=costs.measured)
        # What the text of the last steps came at: tokens, and their cost.
        self._tokens, self._spent = mats[best], mats[best] / speeds[best]
        self._usual = self._favourite = self._size = best
        self._hopeful = [True] * len(self.sizes)
        self._rest = self._refused = 0
        self._begun = 0.0
        self._explored = 0  # the step that last measured a size
        self._used = [0] * len(self.sizes)  # the step that last took each size
        self._uses = [0.0] * len(self.sizes)  # how often lately
        self._uses[best] = KNOWN

    @property
    def size(self) -> int:
        """Tokens that the last step took as best, the root included."""
        return self.sizes[self._usual]

    def start(self, prompts: list[list[int]]) -> None:
        """Begin a batch of sequences."""
        self.drafter.start(prompts)
        self.acceptance.start()
        self._rows = len(prompts)
        self._context = float(max(map(len, prompts)))

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Ask the drafter, unless its drafts are refused."""
        return None if self._refused > PATIENCE else self.drafter.wants(tokens)

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        """Pass a chunk of the prompts on."""
        self.drafter.prime(tokens, logits, valid)

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the beginning of the whole draft that gains most."""
        self._begun = perf_counter()
        self._steps += 1
        unusual = self._unusual()
        if self._rest and unusual is None:
            self._rest -= 1
            self._size = 0
            return self.drafter.rest(roots)
        whole = self.drafter.propose(roots)
        self.acceptance.watch(whole)
        mats, nodes = self._offer(whole)
        self._usual = self._best(mats, nodes)
        if self._usual:
            self._refused = 0
        elif nodes[-1] > 1:
            self._refused += 1
            self._rest = min(self._refused // PATIENCE, LONGEST_REST)
        self._size = self._usual if unusual is None else unusual
        return whole.first(self.sizes[self._size])

    def sources(self, draft: DraftTree) -> list[str]:
        """Ask the drafter."""
        return self.drafter.sources(draft)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Let the drafter learn, and note what the step took and emitted."""
        self.drafter.observe(draft, logits, accepted)
        if self.acceptance.follow(accepted):
            self._ratios = self.acceptance.ratios(self.sizes)
        emitted = max(map(len, accepted.tokens))
        self._context += emitted
        seconds = perf_counter() - self._begun
        expected = self._price(draft.tokens.numel())
        keep = 1 - 1 / MEMORY
        self._used[self._size] = self._steps
        self._uses = [keep * uses for uses in self._uses]
        self._uses[self._size] += 1
        mostly = self._uses[self._size] == max(self._uses)
        self._pace.note(self._size, seconds, expected, usual=mostly)
        if self._size == self._usual:
            rows = sum(map(bool, accepted.tokens))
            mean = sum(map(len, accepted.tokens)) / max(rows, 1)
            self._tokens = keep * self._tokens + mean
            self._spent = keep * self._spent + expected * exp(self._pace.correction(self._size))

    def speeds(self) -> tuple[list[float], list[float]]:
        """Per size: the expected MAT, and the expected tokens per unit of the cost curve."""
        mats, nodes = self.acceptance.expected(self.sizes)
        speeds = []
        for size, mat in enumerate(mats):
            tokens = nodes[size] if self._compacts else self.sizes[size]
            speeds.append(mat / self.costs.at(self._rows * tokens, self._context))
        return mats, speeds

    def _price(self, tokens: float) -> float:
        """Cost of a step by the curve; looked up anew every ``REVIEW`` steps."""
        if self._steps % REVIEW == 0:
            self._prices.clear()
        if tokens not in self._prices:
            self._prices[tokens] = self.costs.at(tokens, self._context)
        return self._prices[tokens]

    def _offer(self, draft: DraftTree) -> tuple[list[float], list[float]]:
        """Per size: the MAT that this draft promises, and the nodes there are. One read."""
        promised = self.acceptance.promised(draft).mean(dim=0)
        there = draft.valid[:, 1:].any(dim=0).float()
        sums = pad(torch.stack([promised, there]).cumsum(dim=1), (1, 0))[:, self._ends]
        tokens, nodes = sums.tolist()
        # A drafter calibrates its own scores, and sooner; but it may have begun with wrong counts.
        most = inf if draft.scores is None else 1.0
        mats = [1 + min(ratio, most) * more for ratio, more in zip(self._ratios, tokens)]
        return mats, [1 + count for count in nodes]

    def _best(self, mats: list[float], nodes: list[float]) -> int:
        """Index of the size that gains most over what its time brings on average.

        Tokens per second over many steps are highest when every step takes the size of the
        largest (tokens - speed · cost), with the speed reached (Dinkelbach 1967).
        """
        speed = self._tokens / self._spent
        guesses, gains = [], []
        for size, mat in enumerate(mats):
            tokens = nodes[size] if self._compacts else self.sizes[size]
            price = speed * self._price(self._rows * tokens)
            guesses.append(mat - price)
            gains.append(mat - price * exp(self._pace.correction(size)))
        best = gains.index(max(gains))
        self._favourite = guesses.index(max(guesses))
        self._hopeful = [gain > gains[best] - HOPELESS * mats[best] for gain in gains]
        return best

    def _unusual(self) -> int | None:
        """Index of a size to measure in this step, if it is time for one.

        Plain decoding, the neighbours of the usual size and the one that the curve alone would
        take: often until they are known, then seldom, and rarely where there is little hope.
        """
        if self._steps - self._explored < OFTEN:
            return None
        others = {0, self._usual - 1, self._usual + 1, self._favourite} - {self._usual}
        due = [
            size
            for size in others
            if 0 <= size < len(self.sizes) and self._steps - self._used[size] >= self._pause(size)
        ]
        if not due:
            return None
        self._explored = self._steps
        return min(due, key=self._used.__getitem__)

    def _pause(self, size: int) -> int:
        """Steps from one measurement of ``size`` to the next."""
        if not self._pace.settled(size):
            return OFTEN
        if self._hopeful[size]:
            return SELDOM
        return RARELY if size else 2 * SELDOM  # the way out must be known
