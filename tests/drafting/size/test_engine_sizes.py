"""The draft-size policy of the engines on simulated machines: what it drafts, and what it costs."""

import numpy as np
import pytest
import torch

from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.size.auto import TIMED, AutoSize
from token_recycling.drafting.size.costs import CostCurve

NODES = 8


ACCEPTANCE = tuple(0.34 * node**-0.95 for node in range(1, 21))


def policy(device="cpu"):
    """The policy of an engine, whose steps were never timed."""
    return AutoSize(ACCEPTANCE, CostCurve.assumed(device), multiple=8)


def draft_of(scores, valid=None):
    """Drafts of which only the scores [B, n] of the nodes below the roots count."""
    scores = np.pad(np.asarray(scores, np.float32), ((0, 0), (1, 0)), constant_values=1)
    rows, n = scores.shape
    tokens = torch.zeros((rows, n), dtype=torch.long)
    there = torch.ones((rows, n), dtype=torch.bool)
    if valid is not None:
        there[:, 1:] = torch.from_numpy(valid)
    ancestors = torch.zeros((rows, n, n), dtype=torch.bool)
    return DraftTree(tokens, tokens, tokens, ancestors, there, n - 1, torch.from_numpy(scores))


class Machine:
    """An engine whose steps take ``a + b x tokens`` seconds, with some noise.

    ``said`` are the scores of the drafted nodes, ``true`` the probability that each one is
    accepted after those before it. With ``common`` all drafts of a step have one size.
    """

    def __init__(self, requests, b, said, true, overhead=0.0, seed=0, common=False):
        self.size = policy()
        self.common = common
        self.rng = np.random.default_rng(seed)
        self.requests, self.b, self.overhead, self.true = requests, b, overhead, true
        self.scores = np.cumprod(said).astype(np.float32)
        self.seconds = self.tokens = self.plain_steps = self.steps = 0
        self.drafted = []

    def step(self, requests=None):
        requests = requests or self.requests
        counts = np.zeros(requests, np.int64)
        self.size.begin(requests)
        if self.size.pays:
            draft = draft_of(np.tile(self.scores, (requests, 1)))
            if self.common:
                counts[:] = self.size.choose(draft) - 1
            else:
                counts = self.size.choose_each(draft)
        drafted = int(counts.sum())
        tokens = requests
        for count in counts.tolist():
            for true in self.true[:count]:
                if self.rng.random() > true:
                    break
                tokens += 1
        seconds = 1 + self.b * (drafted + requests) + self.overhead * (drafted > 0)
        self.seconds += seconds
        seconds *= self.rng.normal(1, 0.05)
        if self.rng.random() < 0.01:
            seconds *= 20  # another program had the machine
        self.size.record(requests, drafted, tokens / requests, seconds)
        self.tokens += tokens
        self.steps += 1
        self.plain_steps += not drafted
        self.drafted.append(drafted / requests)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self

    @property
    def gain(self):
        """Tokens per second against plain steps only."""
        return self.tokens / self.seconds * (1 + self.b * self.requests) / self.requests


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 5, 16])
@pytest.mark.parametrize("common", [False, True])
def test_cheap_nodes_that_are_right_are_all_drafted(requests, common):
    machine = Machine(requests, 0.001, [0.8] * NODES, [0.8] * NODES, common=common).run(400)
    assert np.mean(machine.drafted[100:]) > 0.9 * NODES
    assert machine.plain_steps < 20


@pytest.mark.parametrize("common", [False, True])
def test_a_step_limited_by_arithmetic_drafts_few_nodes(common):
    """16 requests; a node costs 4 % of an empty step, and the third one is right in 17 %."""
    machine = Machine(16, 0.04, [0.55] * NODES, [0.55] * NODES, common=common).run(600)
    assert 0.5 < np.mean(machine.drafted[200:]) < 3
    assert machine.gain > 1.0
    alone = Machine(1, 0.04, [0.55] * NODES, [0.55] * NODES, common=common).run(600)
    assert np.mean(alone.drafted[200:]) > 2


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize(
    ("said", "true", "overhead"),
    [(0.02, 0.02, 0.1), (0.8, 0.0, 0.1), (0.3, 0.3, 0.8)],
    ids=["low scores", "wrong scores", "an overhead that nothing pays"],
)
@pytest.mark.parametrize("common", [False, True])
def test_drafts_that_do_not_pay_cost_next_to_nothing(requests, said, true, overhead, common):
    machine = Machine(requests, 0.03, [said] * NODES, [true] * NODES, overhead, common=common)
    machine.run(3000)
    assert machine.gain > 0.97
    assert machine.plain_steps > 2700


@pytest.mark.parametrize("requests", [8, 16])
def test_a_guess_that_is_too_high_is_found_out(requests):
    """A node costs a third of what is assumed at first, and drafting 40 % of a plain step."""
    machine = Machine(requests, 0.01, [0.6] * NODES, [0.6] * NODES, 0.4).run(200)
    assert machine.gain > 1.15


def test_a_pause_ends():
    """Wrong scores at first; then the text changes."""
    machine = Machine(4, 0.005, [0.8] * NODES, [0.0] * NODES).run(300)
    assert machine.plain_steps > 140
    machine.true = [0.8] * NODES
    machine.drafted = []
    machine.run(1500)
    assert np.mean(machine.drafted[-200:]) > 0.9 * NODES


def test_the_first_steps_are_plain_and_every_number_of_requests_uses_their_times():
    machine = Machine(8, 0.001, [0.8] * NODES, [0.8] * NODES).run(50)
    assert machine.drafted[:TIMED] == [0] * TIMED
    assert machine.plain_steps == TIMED
    for requests in (7, 3, 16, 1):
        machine.step(requests)
    assert machine.plain_steps == TIMED


def test_a_pause_with_many_requests_is_not_one_with_few():
    """16 requests: drafts never pay; then one alone, for which they do at once."""
    machine = Machine(16, 0.2, [0.5] * NODES, [0.5] * NODES).run(600)
    assert np.mean(machine.drafted[-300:]) < 0.5
    machine.requests, machine.drafted, machine.b = 1, [], 0.03
    machine.run(60)
    assert np.mean(machine.drafted) > 1


def after_plain_steps(requests):
    """A policy that has timed the plain steps, of a second each, before the first draft."""
    size = policy()
    size.begin(requests)
    for _ in range(TIMED):
        assert not size.pays
        size.record(requests, 0, 1.0, 1.0)
    assert size.pays
    return size


def test_requests_share_the_step_by_their_scores():
    size = after_plain_steps(2)
    scores = np.array([[0.9, 0.8, 0.7], [0.0004, 0.0003, 0.0002]])
    assert size.choose_each(draft_of(scores)).tolist() == [3, 0]
    off = np.array([[True, False, False], [True] * 3])
    assert size.choose_each(draft_of(scores, off)).tolist() == [1, 0]
    assert size.choose_each(draft_of(scores, np.zeros((2, 3), bool))).tolist() == [0, 0]


def test_one_size_for_all_is_the_best_for_their_sum():
    size = after_plain_steps(2)
    scores = np.array([[0.9, 0.5, 0.01], [0.8, 0.1, 0.0004]])
    assert size.choose(draft_of(scores)) == 3
    off = np.array([[True, False, False], [True, True, True]])
    assert size.choose(draft_of(0.5 * scores, off)) == 2
    assert size.choose(draft_of(scores, np.zeros((2, 3), bool))) == 1


@pytest.mark.parametrize("requests", [1, 3, 4, 8])
def test_large_steps_of_one_size_are_a_multiple_of_eight_tokens(requests):
    size = after_plain_steps(requests)
    scores = np.full((requests, 20), 0.05)
    scores[:, : 9 if requests == 1 else 6] = 0.9
    chosen = size.choose(draft_of(scores))
    assert chosen > 5
    assert chosen * requests % 8 == 0
