"""The automatic draft size on simulated machines and texts, without a model."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
import torch

from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.size.auto import COOLDOWN, LONGEST_COOLDOWN, PROBE, AutoSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.drafting.size.step_costs import StepCosts

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81)
# Of a tree of 80 nodes on text that repeats itself.
# fmt: off
ACCEPTANCE = (
    0.56006, 0.34700, 0.20968, 0.12436, 0.11568, 0.06917, 0.06518, 0.06518,
    0.06425, 0.03891, 0.03829, 0.03810, 0.03687, 0.03519, 0.03130, 0.02676,
    0.02602, 0.02326, 0.02231, 0.02159, 0.02155, 0.01973, 0.01921, 0.01849,
    0.01798, 0.01590, 0.01584, 0.01540, 0.01514, 0.01478, 0.01405, 0.01398,
    0.01330, 0.01269, 0.01222, 0.01212, 0.01088, 0.01076, 0.00959, 0.00959,
    0.00946, 0.00944, 0.00887, 0.00887, 0.00835, 0.00825, 0.00818, 0.00818,
    0.00798, 0.00774, 0.00773, 0.00760, 0.00724, 0.00717, 0.00708, 0.00707,
    0.00707, 0.00705, 0.00705, 0.00701, 0.00701, 0.00695, 0.00690, 0.00643,
    0.00639, 0.00636, 0.00632, 0.00629, 0.00628, 0.00585, 0.00581, 0.00574,
    0.00574, 0.00573, 0.00569, 0.00568, 0.00567, 0.00512, 0.00512, 0.00511,
)
# fmt: on
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
    return CostCurve(sizes, tuple(map(cost, sizes)))


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
        policy.begin(rows)
        self.sizes: list[int] = []
        self.limits: list[int] = []

    def run(self, cost, scale, steps):
        """Take steps; return (expected tokens per second and row in the second half)."""
        tokens = seconds = 0.0
        p = [scale * q for q in ACCEPTANCE]
        for i in range(steps):
            limit = self.policy.limit()
            scores = p if self.scores else None
            n = self.policy.choose(draft_of(limit, self.rows, scores))
            assert 1 <= n <= limit
            mean = sum(p[: n - 1])
            emitted = 1 + sum(self._accepted(mean) for _ in range(self.rows)) / self.rows
            true = cost(self.rows * n)
            noise = self.random.uniform(0.92, 1.08) * (1.5 if self.random.random() < 0.03 else 1)
            seconds_told = self.told(n, true * noise)
            self.policy.record(self.rows, self.rows * (n - 1), emitted, seconds_told)
            self.sizes.append(n)
            self.limits.append(limit)
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
        """Lengths of the runs of steps without a draft."""
        return [len(list(run)) for plain, run in groupby(n == 1 for n in self.limits) if plain]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scores", [True, False])
def test_with_a_measured_curve_the_speed_is_that_of_the_best_size(name, scale, rows, scores):
    """Plain decoding is the best size of some. 3 % are allowed for, and 1 % for measurements."""
    cost = COSTS[name]
    best, size = best_speed(cost, scale, rows)
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(cost)), rows=rows, scores=scores)
    speed = simulation.run(cost, scale, 3000)
    assert speed > 0.96 * best, (speed / best, size, simulation.usual())


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(("wrong", "error"), [(48, 0.75), (32, 1.3)])
def test_one_wrong_point_costs_little_in_batches(wrong, error, rows):
    """Sizes are measured at one row, quickly: the cost of batches lies far beyond the points."""

    def cost(n):
        return 3.7 + 0.055 * n

    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 48)
    seconds = tuple(cost(n) * (error if n == wrong else 1) for n in sizes)
    simulation = Simulation(AutoSize(ACCEPTANCE, CostCurve(sizes, seconds)), rows=rows)
    speed = simulation.run(cost, 1.0, 400)
    assert speed > 0.9 * best_speed(cost, 1.0, rows)[0], simulation.usual()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["middling", "flat", "flat up to 32", "steps"])
def test_a_guessed_curve_is_corrected(name, scale):
    """By a slope, which does not make every shape of another."""
    cost = COSTS[name]
    best, size = best_speed(cost, scale)
    simulation = Simulation(AutoSize(ACCEPTANCE, CostCurve.assumed("cpu")))
    speed = simulation.run(cost, scale, 6000)
    assert speed > 0.85 * best, (speed / best, size, simulation.usual())


@pytest.mark.parametrize("name", COSTS)
def test_one_fixed_size_is_not_the_best_of_all(name):
    """Negative control of the costs: with one of four fixed sizes a lot is lost."""
    for scale in SCALES:
        best, _ = best_speed(COSTS[name], scale)
        fixed = [best_speed(COSTS[name], scale, sizes=(n,))[0] for n in (1, 8, 16, 81)]
        assert min(fixed) < 0.9 * best


def test_wrong_times_end_elsewhere():
    """Negative control: the policy is told that every step takes the same time."""
    cost = COSTS["middling"]
    best, size = best_speed(cost, 1.0)
    policy = AutoSize(ACCEPTANCE, CostCurve.assumed("cpu"))
    simulation = Simulation(policy, told=lambda n, seconds: seconds / cost(n))
    speed = simulation.run(cost, 1.0, 3000)
    assert simulation.usual() > 2 * size
    assert speed < 0.9 * best


def test_pauses_grow_while_drafts_fail_and_shrink_after_success():
    """Every score promises more than comes."""
    cost = COSTS["steps"]
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(cost)))
    simulation.run(cost, 0.0, 6000)
    pauses = simulation.pauses()[:-1]
    assert pauses[0] == COOLDOWN
    assert sorted(pauses) == pauses
    assert pauses[-1] == LONGEST_COOLDOWN
    tail = simulation.sizes[-4 * LONGEST_COOLDOWN :]
    assert sum(n > 1 for n in tail) < 10 * PROBE
    taken = len(simulation.sizes)
    simulation.run(cost, 1.0, 3000)
    later = simulation.sizes[taken + LONGEST_COOLDOWN + 500 :]
    assert later.count(1) == 0
    assert simulation.policy._pause.cooldown == COOLDOWN
    assert simulation.usual() >= 4


def test_a_machine_whose_costs_change():
    """Each time the policy follows, down to smaller drafts and up again."""
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(COSTS["flat"])))
    for name in ("flat", "middling", "flat up to 32", "middling", "flat"):
        speed = simulation.run(COSTS[name], 1.0, 6000)
        best, size = best_speed(COSTS[name], 1.0)
        assert speed > 0.75 * best, (name, speed / best, size, simulation.usual())


def test_a_machine_on_which_drafts_become_too_expensive_and_cheap_again():
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(COSTS["flat"])))
    for name in ("flat", "steep", "flat"):
        speed = simulation.run(COSTS[name], 1.0, 6000)
        best, size = best_speed(COSTS[name], 1.0)
        assert speed > 0.85 * best, (name, speed / best, size, simulation.usual())


def test_a_slower_machine_changes_nothing():
    """A slowdown of all sizes by five does not change the choice between them."""
    cost = COSTS["middling"]
    found = {}
    for slowness in (1.0, 5.0):
        simulation = Simulation(AutoSize(ACCEPTANCE, curve(cost)))
        simulation.run(cost, 1.0, 300)
        simulation.run(lambda n, times=slowness: times * cost(n), 1.0, 1000)
        found[slowness] = simulation.usual()
    assert found[5.0] == pytest.approx(found[1.0], rel=0.2)


def test_another_number_of_rows_has_its_own_size():
    cost = COSTS["flat up to 32"]
    policy = AutoSize(ACCEPTANCE, curve(cost))
    sizes = {}
    for rows in (1, 5, 1, 5):
        simulation = Simulation(policy, rows=rows)
        speed = simulation.run(cost, 1.0, 1500)
        assert speed > 0.9 * best_speed(cost, 1.0, rows)[0], rows
        sizes.setdefault(rows, []).append(simulation.usual())
    assert min(sizes[1]) > max(sizes[5])


def test_the_state_is_what_was_learnt_from_texts():
    """A text that can hardly be drafted; a copy begins with its sizes, a new policy does not."""
    cost = COSTS["middling"]
    policy = AutoSize(ACCEPTANCE, curve(cost))
    simulation = Simulation(policy)
    simulation.run(cost, 0.15, 1500)
    state = policy.state()
    assert set(state) == {"tokens"}
    new, again = (AutoSize(ACCEPTANCE, curve(cost)) for _ in range(2))
    assert new.typical() > policy.typical()
    again.restore(state)
    assert again.typical() == pytest.approx(
        policy.typical(), abs=1
    )  # which knows its costs better by now
    assert again.state()["tokens"].equal(state["tokens"])
    Simulation(again).run(cost, 1.0, 100)
    assert not again.state()["tokens"].equal(state["tokens"])
    assert policy.state()["tokens"].equal(state["tokens"])  # it is a copy


def test_in_between_plain_steps_no_draft_is_verified():
    """Where the curve says that plain decoding is best."""
    simulation = Simulation(AutoSize(ACCEPTANCE, curve(COSTS["steep"])))
    simulation.run(COSTS["steep"], 0.4, 3000)
    assert sum(n > 1 for n in simulation.sizes[1000:]) < 200


@pytest.mark.parametrize("scores", [True, False])
def test_pauses_end_though_rows_join_and_leave(scores):
    """A server with many requests changes the number of rows every few steps."""
    policy = AutoSize(ACCEPTANCE, CostCurve.assumed("cpu"))
    runs = {rows: Simulation(policy, rows=rows, scores=scores) for rows in (6, 7, 8)}
    cost = COSTS["middling"]

    def decode(scale, changes):
        for _ in range(changes):
            for run in runs.values():
                policy.begin(run.rows)
                run.run(cost, scale, 4)

    decode(0.02, 20)
    assert policy.limit() == 1  # paused: nothing can be drafted
    decode(1.0, 60)
    last = [n for run in runs.values() for n in run.sizes[-120:]]
    assert sum(n == 1 for n in last) < 0.2 * len(last)


def test_every_draft_has_its_own_size():
    """Likely nodes are verified, unlikely ones are not."""
    policy = AutoSize(ACCEPTANCE, curve(COSTS["middling"]))
    policy.begin(1)
    likely, unlikely = [0.5] * 7, [0.01] * 7
    assert policy.choose(draft_of(8, 1, likely)) == 8
    assert policy.choose(draft_of(8, 1, unlikely)) <= 2
    assert policy.choose(draft_of(8, 1, likely[:3] + unlikely[3:])) == 4
    control = AutoSize(ACCEPTANCE, curve(COSTS["steep"]))
    control.begin(1)
    assert control.choose(draft_of(8, 1, likely)) == 1


def test_costs_learn_the_slope_and_not_the_height():
    """The curve says 6 % for each further token; in truth it is nothing, or 20 %."""
    for truth in (0.0, 0.2):
        costs = StepCosts(curve(COSTS["middling"]))
        for n in 50 * [1, 2, 4, 8, 16]:
            costs.record(n, n > 1, 7.0 * (1 + truth * (n - 1)))
        costs.record(8, True, 1e9)  # an interrupted step
        found = costs.of(np.arange(1, 17))[[0, 3, 15]]
        wanted = np.array([1.0, 1 + truth * 3, 1 + truth * 15])
        assert found / found[0] == pytest.approx(wanted, rel=0.2)
    assert StepCosts(curve(COSTS["middling"])).line() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("jump", [0.0, 0.5])
def test_costs_learn_what_all_steps_with_drafts_take_longer(jump):
    """An engine prepares drafts in a way of its own; from few plain steps, of another batch."""
    costs = StepCosts(CostCurve.assumed("cuda"))
    for step in range(60):
        n = (8, 12, 16, 24)[step % 4] if step > 4 else 4
        costs.record(n, step > 4, 1 + jump * (step > 4))
    found = costs.of(np.arange(4, 17))
    assert found[8] / found[0] == pytest.approx(1 + jump, rel=0.15)


def test_the_first_step_of_every_size_teaches_nothing():
    costs = StepCosts(CostCurve.assumed("cuda"))
    costs.record(8, True, 9.0)
    assert costs.spread == 0.0
    assert costs.line() == (0.0, 0.0, 0.0)


def test_why_nothing_is_drafted_is_said_in_figures():
    dear, cheap = (AutoSize(ACCEPTANCE, curve(COSTS[name])) for name in ("steep", "flat"))
    assert cheap.why_plain() is None
    said = dear.why_plain()
    assert said == (
        "drafts do not pay at present: verifying 2 tokens takes 2.00 times as long as a step "
        "with 1 token here, and brings 1.56 tokens"
    )
    Simulation(dear).run(COSTS["steep"], 0.02, 300)
    takes, brings = re.findall(r"(?:takes|brings) (\d\.\d\d)", dear.why_plain())
    assert float(takes) > 1.2 * float(brings)
    cheap._pause.plain_left = 7
    assert (
        cheap.why_plain()
        == "drafting is disabled for 7 more steps: no recent draft was worth verifying"
    )
