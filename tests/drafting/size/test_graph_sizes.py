"""The draft-size policy of graphs, whose drafts have one size, without a graph."""

import random

import pytest

from token_recycling.drafting.size.auto import CAPTURED_AFTER, COOLDOWN, AutoSize
from token_recycling.drafting.size.base import FixedSize
from token_recycling.drafting.size.costs import CostCurve

ACCEPTANCE = tuple(0.34 * node**-0.95 for node in range(1, 33))
SIZES = (1, 2, 4, 8, 16, 33)


def curve(cost):
    return CostCurve(SIZES, tuple(map(cost, SIZES)))


def cheap(n):
    return 1 + 0.01 * (n - 1)


def decode(policy, nodes, steps, came, cost=cheap, rows=1, seed=0):
    """Take steps as ``GraphDecoder`` does; return their sizes."""
    rng = random.Random(seed)
    sizes = []
    policy.begin(rows)
    for _ in range(steps):
        n = nodes if policy.pays else 1
        emitted = 1 + (came * rng.uniform(0.5, 1.5) if n > 1 else 0)
        policy.record(rows, rows * (n - 1), emitted, cost(n) * rng.uniform(0.95, 1.05))
        sizes.append(n)
    return sizes


def test_drafts_that_pay_never_pause():
    policy = AutoSize(ACCEPTANCE, curve(cheap))
    nodes = policy.typical()
    assert nodes > 8
    assert set(decode(policy, nodes, 300, came=1.2)) == {nodes}


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_that_do_not_pay_pause_longer_and_longer(rows):
    policy = AutoSize(ACCEPTANCE, curve(cheap))
    sizes = decode(policy, 12, 3000, came=0.02, rows=rows)
    assert sizes[:20] == [12] * 20  # it takes some to know
    assert sizes.count(1) > 2600
    changes = [i for i in range(1, 3000) if sizes[i] != sizes[i - 1]]
    pauses = [end - begin for begin, end in zip(changes[::2], changes[1::2])]
    assert pauses[0] == COOLDOWN
    assert pauses == sorted(pauses)


def test_they_are_tried_again():
    policy = AutoSize(ACCEPTANCE, curve(cheap))
    decode(policy, 12, 600, came=0.0)
    assert decode(policy, 12, 3000, came=1.5)[-500:] == [12] * 500


@pytest.mark.parametrize("captured", [True, False])
def test_no_plain_step_is_captured_before_many_steps(captured):
    policy = AutoSize(ACCEPTANCE, CostCurve.assumed("cuda"), captured=captured)
    sizes = decode(policy, 12, CAPTURED_AFTER + 40, came=0.0)
    assert (sizes.index(1) == CAPTURED_AFTER) == captured
    assert sizes.count(1) >= 4
    dear = AutoSize(ACCEPTANCE, CostCurve.assumed("cuda"), captured=captured)
    sizes = decode(dear, 12, 4000, came=0.3, cost=lambda n: 1 + 0.3 * (n - 1))
    assert sizes[-500:].count(1) > 350  # measured by then


def test_the_size_of_an_answer_is_kept_unless_another_is_clearly_better():
    def cost(n):
        return 1 + 0.04 * (n - 1)

    policy = AutoSize(ACCEPTANCE, curve(cost))
    best = policy.typical()
    assert best == 8
    assert policy.typical(4) == 4
    assert policy.typical(32) == best
    decode(policy, best, 500, came=6.0, cost=cost)  # more comes than the scores promise
    assert policy.typical(2) == policy.typical() == 16


def test_a_fixed_size_is_kept():
    assert FixedSize(8).typical() == FixedSize(8).typical(3) == 8
    assert FixedSize().typical() is None
