"""The draft-size policy of the engines on simulated machines: what it drafts, and what it costs."""

import numpy as np
import pytest

from token_recycling.integrations.engines.draft_size import EngineDraftSize

NODES = 8


class Machine:
    """An engine whose steps take ``a + b x tokens`` seconds, with some noise.

    ``said`` are the scores of the drafted nodes, ``true`` the probability that each one is
    accepted after those before it. With ``common`` all drafts of a step have one size.
    """

    def __init__(self, requests, b, said, true, overhead=0.0, seed=0, slope=0.03, common=False):
        self.size = EngineDraftSize(slope)
        self.common = common
        self.rng = np.random.default_rng(seed)
        self.requests, self.b, self.overhead, self.true = requests, b, overhead, true
        self.scores = np.cumprod(said).astype(np.float32)
        self.seconds = self.tokens = self.plain_steps = self.steps = 0
        self.drafted = []

    def step(self, requests=None):
        requests = requests or self.requests
        counts = np.zeros(requests, np.int64)
        if self.size.drafts(requests):
            scores = np.tile(self.scores, (requests, 1))
            valid = np.ones_like(scores, dtype=bool)
            if self.common:
                counts[:] = self.size.choose_common(scores, valid)
            else:
                counts = self.size.choose(scores, valid)
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
        self.size.record(requests, drafted, tokens, seconds)
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
    assert machine.gain > 1.2


def test_a_pause_ends():
    """Wrong scores at first; then the text changes."""
    machine = Machine(4, 0.005, [0.8] * NODES, [0.0] * NODES).run(300)
    assert machine.plain_steps > 200
    machine.true = [0.8] * NODES
    machine.drafted = []
    machine.run(1500)
    assert np.mean(machine.drafted[-200:]) > 0.9 * NODES


def test_a_number_of_requests_near_one_that_is_known_needs_no_probe():
    machine = Machine(8, 0.001, [0.8] * NODES, [0.8] * NODES).run(50)
    before = machine.plain_steps
    for requests in (7, 6, 9, 11):
        machine.step(requests)
    assert machine.plain_steps == before
    machine.step(3)
    assert machine.plain_steps == before + 1


def after_plain_steps(requests, slope):
    """A policy that has timed the plain steps, of a second each, before the first draft."""
    size = EngineDraftSize(slope)
    for _ in range(4):
        assert not size.drafts(requests)
        size.record(requests, 0, requests, 1.0)
    assert size.drafts(requests)
    return size


def test_requests_share_the_step_by_their_scores():
    size = after_plain_steps(2, 0.03)
    scores = np.array([[0.9, 0.8, 0.7], [0.004, 0.003, 0.002]], np.float32)
    assert size.choose(scores, np.ones((2, 3), bool)).tolist() == [3, 0]
    off = np.array([[True, False, False], [True] * 3])
    assert size.choose(scores, off).tolist() == [1, 0]


def test_one_size_for_all_is_the_best_for_their_sum():
    size = after_plain_steps(2, 0.3)
    # A node takes 0.3 x 0.3 / 1.6 seconds of the first guess, about 0.056.
    scores = np.array([[0.9, 0.5, 0.1], [0.8, 0.1, 0.004]], np.float32)
    assert size.choose_common(scores, np.ones((2, 3), bool)) == 2
    off = np.array([[True, False, False], [True, True, True]])
    assert size.choose_common(scores, off) == 1
    assert size.choose_common(scores, np.zeros((2, 3), bool)) == 0


@pytest.mark.parametrize(("requests", "nodes"), [(1, 15), (3, 7), (4, 7), (8, 6)])
def test_large_steps_of_one_size_are_filled_up(requests, nodes):
    """Roots included, to a multiple of 8 tokens: 16, 24, 32; 8 requests always have one."""
    size = after_plain_steps(requests, 0.03)
    scores = np.zeros((requests, 20), np.float32)
    scores[:, : 9 if requests == 1 else 6] = 0.9
    assert size.choose_common(scores, np.ones(scores.shape, bool)) == nodes
