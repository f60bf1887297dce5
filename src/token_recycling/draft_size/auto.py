"""The automatic draft-size policy, from measured step costs and expected tokens."""

from __future__ import annotations

from math import exp, inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling.draft_size.acceptance import AcceptanceRates
from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.draft_size.gate import SpeculationGate
from token_recycling.draft_size.timer import KNOWN, StepTimer
from token_recycling.errors import TokenRecyclingError
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

REVIEW = 8  # steps for which costs from the curve are cached
OFTEN, SELDOM, RARELY = 3, 64, 512  # steps between measurements of a size
# A size whose gain is below the best one by more than this fraction of the MAT is measured rarely.
HOPELESS = 0.3
MEMORY = 50.0  # steps after which the weight of an old one in the speed is 1/e
PATIENCE = 4  # drafts refused in a row before a cooldown
LONGEST_COOLDOWN = 15  # longest cooldown, in steps of plain decoding


class AutoSize(DraftSize):
    """Verifies the first n nodes of every draft, with n chosen by expected tokens per second.

    Expected tokens are the sum of the draft's scores or, if it has none, of acceptance rates
    (``AcceptanceRates``). Costs come from a curve that is corrected by the measured time of steps
    (``StepTimer``). Size 1 is plain decoding, chosen where no draft pays off.
    """

    def __init__(
        self, acceptance: tuple[float, ...], costs: CostCurve, device: torch.device | str = "cpu"
    ) -> None:
        """Choose sizes by ``costs``.

        Args:
            acceptance: acceptance probabilities (see ``Drafter.acceptance``).
            costs: step cost by tokens verified.
            device: that of the drafts.

        Raises:
            TokenRecyclingError: ``acceptance`` is empty, so drafts cannot be truncated.
        """
        if not acceptance:
            raise TokenRecyclingError(
                "drafts of this drafter cannot be truncated; choose a fixed tree"
            )
        self.costs = costs
        most = len(acceptance) + 1
        self.sizes = sorted({most, *(size for size in costs.sizes if size < most)})
        self.rates = AcceptanceRates(acceptance, device)
        # On a CPU the decoding loop drops invalid nodes.
        self._compacts = torch.device(device).type == "cpu"
        self._batch, self._context, self._steps = 1, 0.0, 0
        self._ends = torch.tensor(self.sizes, device=device) - 1
        self._prices: dict[float, float] = {}  # cost of a step by tokens, at the current context
        self._ratios = self.rates.ratios(self.sizes)
        mats, speeds = self.speeds()
        best = speeds.index(max(speeds))
        self._timer = StepTimer(len(self.sizes), best, trusted=costs.measured)
        # Decayed sums over recent steps: tokens emitted, and their cost.
        self._tokens, self._spent = mats[best], mats[best] / speeds[best]
        self._usual = self._favourite = self._size = best
        self._hopeful = [True] * len(self.sizes)
        self._cooldown = self._refused = 0
        self._unusual: int | None = None  # index of the size that the next step measures
        self._explored = 0  # number of the step that last measured a size
        self._used = [0] * len(self.sizes)  # number of the step that last used each size
        self._uses = [0.0] * len(self.sizes)  # decayed count of each size's uses
        self._uses[best] = KNOWN

    @property
    def size(self) -> int:
        """Best draft size at the last step, including the root."""
        return self.sizes[self._usual]

    @property
    def pays(self) -> bool:  # type: ignore[override]
        """False while drafts are refused."""
        return self._refused <= PATIENCE

    def for_graph(self) -> DraftSize:
        """Return a speculation gate between the current size and plain decoding."""
        return SpeculationGate(self.size, self.costs)

    def state(self) -> dict[str, Tensor]:
        """Return the acceptance rates."""
        return self.rates.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from acceptance rates."""
        self.rates.restore(state)

    def begin(self, sequences: list[Sequence]) -> None:
        """Start with new texts."""
        self.rates.begin()
        self._batch = len(sequences)
        self._context = float(max(len(sequence.tokens) for sequence in sequences))

    def limit(self) -> int | None:
        """Return None, or 1 during a cooldown."""
        self._steps += 1
        self._unusual = self._due()
        if self._cooldown and self._unusual is None:
            self._cooldown -= 1
            self._size = 0
            return 1
        return None

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return the size with the highest expected gain, or one that is due to be measured."""
        if draft.nodes == 1:
            self._size = 0
            return 1
        draft = draft.first(self.sizes[-1]).padded(self.sizes[-1])
        self.rates.watch(draft, sequences)
        mats, nodes = self._offer(draft)
        self._usual = self._best(mats, nodes)
        if self._usual:
            self._refused = 0
        elif nodes[-1] > 1:
            self._refused += 1
            self._cooldown = min(self._refused // PATIENCE, LONGEST_COOLDOWN)
        self._size = self._usual if self._unusual is None else self._unusual
        return self.sizes[self._size]

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Update acceptance rates, step costs and speed from a step."""
        if self.rates.judge(sequences):
            self._ratios = self.rates.ratios(self.sizes)
        counts = list(map(len, step.tokens))
        self._context += max(counts)
        expected = self._price(len(counts) * step.nodes)
        decay = 1 - 1 / MEMORY
        self._used[self._size] = self._steps
        self._uses = [decay * uses for uses in self._uses]
        self._uses[self._size] += 1
        mostly = self._uses[self._size] == max(self._uses)
        self._timer.record(self._size, sum(step.seconds), expected, usual=mostly)
        if self._size == self._usual:
            mean = sum(counts) / max(sum(map(bool, counts)), 1)
            cost = expected * exp(self._timer.correction(self._size))
            self._tokens = decay * self._tokens + mean
            self._spent = decay * self._spent + cost

    def speeds(self) -> tuple[list[float], list[float]]:
        """Return, per size, the expected MAT and the expected tokens per unit of cost."""
        mats, nodes = self.rates.expected(self.sizes)
        speeds = []
        for size, mat in enumerate(mats):
            tokens = nodes[size] if self._compacts else self.sizes[size]
            speeds.append(mat / self.costs.at(self._batch * tokens, self._context))
        return mats, speeds

    def _price(self, tokens: float) -> float:
        """Return the cost of a step by the curve, cached for up to ``REVIEW`` steps."""
        if self._steps % REVIEW == 0:
            self._prices.clear()
        if tokens not in self._prices:
            self._prices[tokens] = self.costs.at(tokens, self._context)
        return self._prices[tokens]

    def _offer(self, draft: DraftTree) -> tuple[list[float], list[float]]:
        """Return, per size, the MAT that the draft promises and its valid nodes; reads once."""
        promised = self.rates.promised(draft).mean(dim=0)
        there = draft.valid[:, 1:].any(dim=0).float()
        sums = pad(torch.stack([promised, there]).cumsum(dim=1), (1, 0))[:, self._ends]
        tokens, nodes = sums.tolist()
        # The drafter calibrates its scores, and adapts faster than the ratios do. The ratios may
        # only lower scores, in case the drafter started with wrong counts.
        most = inf if draft.scores is None else 1.0
        mats = [1 + min(ratio, most) * more for ratio, more in zip(self._ratios, tokens)]
        return mats, [1 + count for count in nodes]

    def _best(self, mats: list[float], nodes: list[float]) -> int:
        """Return the index of the size with the highest gain: tokens - speed · cost.

        Maximizing this at every step, with ``speed`` the recent tokens per unit of cost, maximizes
        tokens per second over many steps (Dinkelbach 1967).
        """
        speed = self._tokens / self._spent
        guesses, gains = [], []
        for size, mat in enumerate(mats):
            tokens = nodes[size] if self._compacts else self.sizes[size]
            price = speed * self._price(self._batch * tokens)
            guesses.append(mat - price)
            gains.append(mat - price * exp(self._timer.correction(size)))
        best = gains.index(max(gains))
        self._favourite = guesses.index(max(guesses))
        self._hopeful = [gain > gains[best] - HOPELESS * mats[best] for gain in gains]
        return best

    def _due(self) -> int | None:
        """Return the index of a size to measure in this step, or None.

        Candidates are plain decoding, the neighbours of the usual size, and the size that is best
        by the uncorrected curve. They are measured often until their cost is known, then seldom,
        and rarely if their gain is far below the best.
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
        """Return the number of steps between measurements of ``size``."""
        if not self._timer.is_known(size):
            return OFTEN
        if self._hopeful[size]:
            return SELDOM
        return RARELY if size else 2 * SELDOM  # plain decoding: its cost must stay current
