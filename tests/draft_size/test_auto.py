"""The automatic draft size on simulated machines and texts, without a model."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
import torch

from token_recycling import TreeTemplate
from token_recycling.draft_size.auto import COOLDOWN, LONGEST_COOLDOWN, PROBE, AutoSize
from token_recycling.draft_size.costs import SIZES, CostCurve
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

ACCEPTANCE = TreeTemplate.load("ranked", 8).first(80).acceptance
MOST = 20  # nodes on the longest path of a simulated draft
# Tokens verified in a step of all rows -> seconds.
COSTS = {
    "steep": lambda n: float(n),
    "middling": lambda n: 1 + 0.06 * (n - 1),
    "flat": lambda n: 1 + 0.001 * n,
    "flat up to 32": lambda n: 1 + 0.003 * (n - 1) if n <= 32 else 1.1 + 0.05 * (n - 32),
    "steps": lambda n: np.interp(n, [1, 4, 8, 24, 48, 81], [2.6, 3.5, 3.6, 4.6, 6.4, 8.5]) / 2.6,
}
SCALES = [1.0, 0.4, 0.15]  # of the acceptance probabilities: how well the text can be drafted


def curve(cost):
    """A curve measured on a machine with this cost; steps of several rows are on it too."""
    sizes = (*SIZES, 160, 240, 320, 405)
    return CostCurve(sizes, (0,), (tuple(map(cost, sizes)),))


def draft_of(nodes, rows, scores):
    """A draft of which only the number of nodes and the scores count."""
    tokens = torch.zeros(rows, nodes, dtype=torch.long)
    valid = torch.ones(rows, nodes, dtype=torch.bool)
    if scores is not None:
        scores = torch.tensor([1.0, *scores[: nodes - 1]]).expand(rows, nodes)
    ancestors = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    return DraftTree(tokens, tokens, tokens, ancestors, valid, MOST, scores)


def best_speed(cost, scale, rows=1, sizes=SIZES):
    """(tokens per second and row of the best size, that size)."""
    return max((1 + scale * sum(ACCEPTANCE[: n - 1])) / cost(rows * n) for n in sizes), max(
        sizes, key=lambda n: (1 + scale * sum(ACCEPTANCE[: n - 1])) / cost(rows * n)
    )


class Simulation:
    """A policy that is called as the decoding loop calls it; time and tokens are drawn."""

    def __init__(self, policy, *, rows=1, seed=1, scores=True, told=lambda n, seconds: seconds):
        """``told``: the time that the policy is told of a step."""
        self.policy, self.rows, self.scores, self.told = policy, rows, scores, told
        self.random = random.Random(seed)
        self.sequences = [Sequence([1] * 100) for _ in range(rows)]
        policy.begin(self.sequences)
        self.sizes: list[int] = []

    def run(self, cost, scale, steps):
        """Take steps; return (expected tokens per second and row in the second half)."""
        tokens = seconds = 0.0
        p = [scale * q for q in ACCEPTANCE]
        for i in range(steps):
            limit = self.policy.limit()
            scores = p if self.scores else None
            n = self.policy.choose(draft_of(limit, self.rows, scores), self.sequences)
            assert 1 <= n <= limit
            mean = sum(p[: n - 1])
            emitted = [[5] * (1 + self._accepted(mean)) for _ in range(self.rows)]
            true = cost(self.rows * n)
            noise = self.random.uniform(0.92, 1.08) * (1.5 if self.random.random() < 0.03 else 1)
            spent = (self.told(n, true * noise), 0.0, 0.0, 0.0, 0.0)
            nothing = [None] * self.rows
            self.policy.record(Step(emitted, nothing, [n - 1] * self.rows, n, spent), self.sequences)
            self.sizes.append(n)
            if i >= steps // 2:
                tokens, seconds = tokens + 1 + mean, seconds + true
        return tokens / seconds

    def _accepted(self, mean):
        if mean == 0:
            return 0
        return min(int(self.random.expovariate(1 / mean) + self.random.random()), MOST)

    def usual(self, last=500):
        """The size of most of the last steps."""
        return Counter(self.sizes[-last:]).most_common(1)[0][0]

    def pauses(self):
        """Lengths of the runs of plain steps."""
        return [len(list(run)) for plain, run in groupby(n == 1 for n in self.sizes) if plain]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", COSTS)
def test_with_a_measured_curve_the_speed_is_that_of_the_best_size(name, scale):
    cost = COSTS[name]
    best, size = best_speed(cost, scale)
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(cost)))
    speed = simulation.run(cost, scale, 3000)
    print(name, scale, speed/best, size, simulation.usual())
    assert speed > 0.97 * best, (size, simulation.usual())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", COSTS)
def test_a_guessed_curve_is_corrected(name, scale):
    cost = COSTS[name]
    best, size = best_speed(cost, scale)
    simulation = Simulation(AutoSize(ACCEPTANCE, CostCurve.assumed("cpu")))
    speed = simulation.run(cost, scale, 6000)
    print(name, scale, speed/best, size, simulation.usual())
    assert speed > 0.9 * best, (size, simulation.usual())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("rows", [1,5])
def test_batches(name, scale, rows):
    cost = COSTS[name]
    best, size = best_speed(cost, scale, rows)
    for scores in (True, False):
        simulation = Simulation(AutoSize(ACCEPTANCE, curve(cost)), rows=rows,scores=scores)
        speed = simulation.run(cost, scale, 3000)
        print("BATCH",rows, scores, name, scale, round(speed/best,3), size, simulation.usual())

def test_cool():
    policy = AutoSize(ACCEPTANCE, curve(COSTS["flat"]))
    s = Simulation(policy)
    for name in ("flat","steep","flat","middling","steep","flat"):
        sp=s.run(COSTS[name],1.0,4000)
        print(name, sp/best_speed(COSTS[name],1.0)[0], s.usual(), s.policy._cooldown, s.pauses()[-12:], best_speed(COSTS[name],1.0))
