"""The automatic draft-size policy: every draft is cut where its tokens per second are greatest.

The loop, graphs, the server's batches, vLLM and SGLang use this one object. A step of R rows that
verifies t tokens is worth (1 + r · s + LEARNING · g · log2(t / R)) / cost(t): s is the sum of the
scores of the drafted nodes per row, which are probabilities; r the ratio of tokens that came to
tokens that were expected; g the mean number of drafted tokens that come, so that the last term is
what the drafter learns from nodes that are rejected. A plain step is t = R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.size.base import DraftSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.drafting.size.speeds import best, choose, speeds
from token_recycling.drafting.size.step_costs import StepCosts
from token_recycling.errors import TokenRecyclingError

LEARNING = 0.15  # value of twice the nodes for learning, in the tokens that drafts bring at present
MEMORY = 100.0  # steps after which the weight of an old one is 1/e
GAIN = 0.5  # drafted tokens accepted per step, assumed before the first step
PRIOR = 4.0  # tokens that count as expected and as accepted before the first step
# Nodes that are grown: at least ``FEWEST``, and ``GROWTH`` times the largest of the last drafts.
FEWEST, GROWTH = 8, 2.0
REFRESH = 16  # steps for which costs are taken as constant
# While ``StepCosts.spread`` is below ``ENOUGH``, one step of ``EXPLORE`` takes half its best size.
ENOUGH, EXPLORE = 8.0, 16
# Sizes of graphs: few, and at the edges of the tiles of matrix products on GPUs.
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
CHANGE = 1.1  # by how much another size must be faster for a graph of it
# After ``PATIENCE`` drafts in a row of which none is worth verifying, drafts pause for ``COOLDOWN``
# steps, twice as many every time; then ``PROBE`` drafts are verified whatever they promise.
PATIENCE, PROBE, COOLDOWN, LONGEST_COOLDOWN = 16, 8, 32, 512
# Where costs were not measured, ``TIMED`` plain steps are timed: at first, and after
# ``TIMED_AFTER`` steps with drafts, the first time and every later time. The first captured plain
# step took 4 seconds on an H100, which 64 tokens exceed by 0.6 ms (8B parameters): hence after
# ``CAPTURED_AFTER``, and no pauses before.
TIMED, TIMED_AFTER, CAPTURED_AFTER = 4, (64, 512), 2048


@dataclass
class _Pauses:
    """When drafts pause, for about one number of rows."""

    idle: int = 0  # drafts in a row that were not worth verifying
    cooldown: int = COOLDOWN
    plain_left: int = 0
    probe_left: int = 0

    def record(self) -> None:
        """Count a step; begin and end pauses."""
        if self.plain_left:
            self.plain_left -= 1
            self.probe_left = 0 if self.plain_left else PROBE
        elif self.probe_left:
            self.probe_left -= 1
        elif self.idle >= PATIENCE:
            self.plain_left, self.idle = self.cooldown, 0
            self.cooldown = min(2 * self.cooldown, LONGEST_COOLDOWN)


class AutoSize(DraftSize):
    """Verifies the nodes with the most tokens per second (see above)."""

    def __init__(
        self,
        acceptance: tuple[float, ...],
        costs: CostCurve,
        multiple: int = 1,
        *,
        captured: bool = False,
        learning: float = LEARNING,
    ) -> None:
        """Choose sizes by ``costs``.

        Args:
            acceptance: acceptance probabilities (see ``Drafter.acceptance``), for drafts without
                scores.
            costs: step cost by tokens verified.
            multiple: steps of more tokens than this verify a multiple of it, or all there are,
                where something is prepared anew for every number of tokens.
            captured: steps are captured, so that the first plain one takes seconds: none is taken
                before ``CAPTURED_AFTER`` steps with drafts.
            learning: see ``LEARNING``; 0: nodes that are rejected are worth nothing.

        Raises:
            TokenRecyclingError: ``acceptance`` is empty, so drafts cannot be truncated.
        """
        if not acceptance:
            raise TokenRecyclingError(
                "drafts of this drafter cannot be truncated; choose a fixed tree"
            )
        self.costs, self.multiple, self._captured = costs, multiple, captured
        self._learning = learning
        self.most = len(acceptance) + 1
        self._step_costs = StepCosts(costs)
        self._mean = np.array(acceptance)  # decayed mean of the scores of each node
        self._acceptance = self._mean.copy()
        self._accepted = self._expected = PRIOR  # decayed sums of drafted tokens
        self._gain = GAIN
        self._reach = float(FEWEST)  # nodes to grow
        self._promised: float | None = None  # tokens that this step's nodes promise, if chosen
        self._steps = self._since_plain = self._timings = 0
        self._timed_left = TIMED if not (captured or costs.measured) else 0
        self._pauses: dict[int, _Pauses] = {}
        self._rows = 0
        self.begin(1)

    def begin(self, rows: int) -> None:
        """Go on with this number of rows."""
        if rows == self._rows:
            return
        self._rows = rows
        self._pause = self._pauses.setdefault(rows.bit_length(), _Pauses())
        self._refresh()

    def _refresh(self) -> None:
        """Compute the costs and the doublings of R, R + 1, … tokens."""
        tokens = np.arange(self._rows, self._rows * self.most + 1)
        self._prices = self._step_costs.of(tokens)
        self._odd = (tokens > self.multiple) & (tokens % self.multiple != 0)
        self._doublings = np.log2(tokens / self._rows)

    @property
    def pays(self) -> bool:  # type: ignore[override]
        """False while drafts pause."""
        return not (self._pause.plain_left or self._timed_left)

    def limit(self) -> int:
        """Return the nodes to grow in the next step."""
        nodes = -(-int(self._reach) // self.multiple) * self.multiple
        return min(self.most, nodes) if self.pays else 1

    def typical(self, now: int = 0, sizes: tuple[int, ...] = GRAPH_SIZES) -> int:
        """Return the best of ``sizes`` for an average draft; ``now`` if nearly as good."""
        promised = self._mean.cumsum()
        rates = self._speeds(promised, self._rows * np.arange(1, len(promised) + 1))
        fastest = max((n for n in sizes if n <= self.most), key=lambda n: float(rates[n - 1]))
        return now if now and rates[fastest - 1] < CHANGE * rates[now - 1] else fastest

    def why_plain(self) -> str | None:
        """Return the costs and tokens of the best draft if a plain step is better (see above)."""
        promised = self._mean.cumsum()
        at = self._rows * np.arange(1, len(promised) + 1)
        rates = self._speeds(promised, at)
        if rates.argmax():
            steps = self._pause.plain_left
            none = (
                f"drafting is disabled for {steps} more steps: no recent draft was worth verifying"
            )
            return none if steps else None
        n = int(rates[1:].argmax())
        brings = 1 + self._accepted / self._expected * promised[n]
        costs = self._prices[at[n]] / self._prices[0]
        return (
            f"drafts do not pay at present: verifying {n + 2} tokens takes {costs:.2f} times as "
            f"long as a step with 1 token here, and brings {brings:.2f} tokens"
        )

    def _speeds(self, promised: Any, at: Any) -> Any:
        """Return the tokens per unit of cost of a plain step, then of each choice of nodes.

        Args:
            promised: sum of the scores per row of each choice.
            at: its index into prices.
        """
        ratio, learnt = self._accepted / self._expected, self._learning * self._gain
        return speeds(promised, at, self._prices, self._doublings, ratio, learnt)

    def _best(self, promised: Any, at: Any) -> int:
        """Return the number of the choice to verify, from 1 on; 0: plain (see ``_speeds``)."""
        probing = self._pause.probe_left > 0
        return int(best(self._speeds(promised, at), at, self._odd, probing))

    def choose(self, draft: DraftTree) -> int:
        """Return the best size of these drafts, one for all rows."""
        if draft.size == 1:
            self._promised = 0.0
            return 1
        scores = self._scores(draft) if draft.scores is None else as_array(draft.scores)
        n, promised = choose(
            scores,
            as_array(draft.valid),
            self._mean,
            1 / MEMORY,
            self._rows,
            self._prices,
            self._doublings,
            self._odd,
            self._accepted / self._expected,
            self._learning * self._gain,
            self._pause.probe_left > 0,
        )
        n = self._explored(n, self._rows)
        self._note(float(promised[n - 1]) if n else 0.0, n)
        return n + 1

    def choose_each(self, draft: DraftTree) -> Any:
        """Return the best number of nodes of each draft, roots not included: array int64 [B].

        A node is verified if its score is among the best of all drafts.
        """
        scores = self._scores(draft)[:, 1:]
        worth = np.sort(scores[scores > 0])[::-1][: (self.most - 1) * self._rows]
        promised = worth.cumsum(dtype=np.float64) / self._rows
        n = self._explored(self._best(promised, np.arange(1, len(worth) + 1)), 1)
        self._note(float(promised[n - 1]) if n else 0.0, -(-n // self._rows))
        if not n:
            return np.zeros(len(scores), np.int64)
        return (scores >= worth[n - 1]).sum(axis=1)

    def _explored(self, n: int, width: int) -> int:
        """Return n, or less than half of it in a step that is to show the slope of the costs.

        Each of the n adds ``width`` tokens to the step.
        """
        if self._steps % EXPLORE == EXPLORE - 1 and self._step_costs.spread < ENOUGH:
            n = (n + 1) // 2
            while n > 1 and self._odd[width * n]:
                n -= 1
        return n

    def _scores(self, draft: DraftTree) -> Any:
        """Return the scores of all nodes, float [B, n]; 0 where there is none."""
        if draft.scores is not None:
            return draft.scores.numpy() * draft.valid.numpy()
        known = np.concatenate([[1.0], self._acceptance[: draft.size - 1]])
        known = np.pad(known, (0, draft.size - len(known)))
        return known * draft.valid.numpy()

    def _note(self, promised: float, nodes: int) -> None:
        """Note what was chosen: the tokens that it promises per row, and nodes below the root."""
        self._promised = promised
        self._reach = max(float(FEWEST), GROWTH * (nodes + 1), self._reach * (1 - 1 / REFRESH))
        self._pause.idle = 0 if nodes else self._pause.idle + 1
        if nodes and not self._pause.probe_left:
            self._pause.cooldown = COOLDOWN

    def record(self, rows: int, drafted: int, emitted: float, seconds: float | None) -> None:
        """Update costs and the ratio of tokens from a step; begin and end pauses."""
        if drafted and self._promised is None and rows == self._rows:  # a graph's, of one size
            nodes = min(drafted // rows, self.most - 1)
            promised, at = self._mean[:nodes].sum(keepdims=True), np.array([rows * nodes])
            self._note(float(promised[0]), nodes * self._best(promised, at))
        if seconds is not None:
            self._step_costs.record(rows + drafted, drafted > 0, seconds)
        self._gain += (emitted - 1 - self._gain) / MEMORY
        if self._promised:
            fade = 1 - 1 / MEMORY
            self._expected = fade * self._expected + self._promised
            self._accepted = fade * self._accepted + emitted - 1
        self._promised = None
        self._steps += 1
        if self._steps % REFRESH == 0:
            self._refresh()
        self._time_plain_steps(drafted > 0)

    def _time_plain_steps(self, drafted: bool) -> None:
        """Count a step; see ``TIMED``."""
        if self._timed_left:
            self._timed_left -= not drafted
            self._since_plain = 0
            if not self._timed_left:
                self._refresh()
            return
        if self._timings or not self._captured:
            self._pause.record()
        self._since_plain = self._since_plain + 1 if drafted else 0
        after = CAPTURED_AFTER if self._captured else TIMED_AFTER[self._timings > 0]
        if not self.costs.measured and self._since_plain >= after:
            self._timed_left, self._timings = TIMED, self._timings + 1

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts."""
        sums = [*self._mean, self._accepted, self._expected, self._gain]
        return {"tokens": torch.tensor(sums, dtype=torch.float64, device="cpu")}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state``."""
        *mean, self._accepted, self._expected, self._gain = state["tokens"].tolist()
        self._mean = np.array(mean)
