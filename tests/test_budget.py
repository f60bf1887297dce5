"""The size of the draft follows costs and text; on a clock that the tests turn themselves."""

import random

import pytest
import torch

from models import random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError, TreeTemplate
from token_recycling.accept import GreedyAcceptor, told
from token_recycling.draft_size.costs import SIZES, CostCurve
from token_recycling.decode import decode
from token_recycling.drafters import (
    AdaptiveDrafter,
    AutoSize,
    NoDrafter,
    PaperDrafter,
    PromptLookupDrafter,
)
from token_recycling.drafters import budget as budget_module
from token_recycling.draft_size.acceptance import EVERY, AcceptanceRates
from token_recycling.draft_size.timer import StepTimer
from token_recycling.tree import TreeShape
from toy import VOCABULARY, ToyTarget, next_logits, plain_greedy

PATH = torch.zeros(1, 8, dtype=torch.long)
RANKED = TreeTemplate.load("ranked", 8).first(80)


def by_last(context):
    """Logits of the last token alone: the matrix knows them once it has seen the token."""
    return next_logits(context[-1:])


class Clock:
    """Time that passes only in ``verify``."""

    def __init__(self, cost):
        self.now, self.cost, self.slowness = 0.0, cost, 1.0

    def __call__(self):
        return self.now


class TimedTarget(ToyTarget):
    def __init__(self, clock, logits):
        super().__init__(logits)
        self.clock = clock
        self.sizes = []

    def verify(self, draft):
        size = draft.tokens.shape[1]
        self.sizes.append(size)
        noise = random.uniform(0.9, 1.1)
        self.clock.now += self.clock.cost(size) * noise * self.clock.slowness
        return super().verify(draft)


def curve(cost, measured=True):
    return CostCurve(SIZES, (0,), (tuple(cost(n) for n in SIZES),), measured)


@pytest.fixture
def simulate(monkeypatch):
    """Decode ``n`` tokens; return (tokens per second in the second half, drafter, target)."""
    random.seed(0)

    def run(cost, *, known=None, logits=by_last, n=250, size=None, change=lambda clock, i: None):
        clock = Clock(cost)
        monkeypatch.setattr(budget_module, "perf_counter", clock)
        target = TimedTarget(clock, logits)
        matrix = AdjacencyMatrix(VOCABULARY, 8)
        drafter = PaperDrafter(matrix, RANKED)
        if size is None:
            guess = CostCurve.assumed("cpu") if known is None else curve(known)
            drafter = AutoSize(drafter, guess)
        else:
            drafter = PaperDrafter(matrix, RANKED.first(size - 1)) if size > 1 else NoDrafter()
        left, half = n, None
        prompt = [3, 1, 4]

        def stop(row, token):
            nonlocal left
            left -= 1
            return None if left else "length"

        found = []
        for i, step in enumerate(decode(target, drafter, GreedyAcceptor(), [prompt], stop)):
            change(clock, i)
            found += step.tokens[0]
            if half is None and len(found) >= n // 2:
                half = (len(found), clock.now)
        assert found == plain_greedy(prompt, n, logits)
        return (len(found) - half[0]) / (clock.now - half[1]), drafter, target

    return run


def flat(n):
    return 1.0 + 0.001 * n


def steep(n):
    return float(n)


def middling(n):
    return 1.0 + 0.06 * (n - 1)


@pytest.mark.parametrize(
    ("logits", "tuned", "cost"),
    [
        *((by_last, True, cost) for cost in (flat, middling, steep)),
        *((by_last, False, cost) for cost in (flat, steep)),
        *((next_logits, True, cost) for cost in (flat, steep)),
    ],
)
def test_the_speed_is_that_of_the_best_size(simulate, logits, tuned, cost):
    speeds = {size: simulate(cost, logits=logits, size=size)[0] for size in (1, 8, 16, 81)}
    # A guess takes a while to correct, and may end on a size that its neighbours hardly better.
    known, n, least = (cost, 400, 0.93) if tuned else (None, 900, 0.8)
    speed, drafter, _ = simulate(cost, known=known, logits=logits, n=n)
    assert speed > least * max(speeds.values()), (drafter.size, speeds)
    worst = min(speeds.values())
    assert worst < 0.75 * max(speeds.values())  # or any choice would have passed


def test_steps_down_to_plain_decoding_and_comes_back(simulate):
    """Verifying becomes dear, then cheap again."""
    dear = {"now": False}

    def cost(n):
        return float(n) if dear["now"] else flat(n)

    def change(clock, i):
        dear["now"] = 60 <= i < 400

    _, drafter, target = simulate(cost, known=flat, n=3000, change=change)
    plain = [size == 1 for size in target.sizes]
    assert sum(plain[10:55]) < 5
    assert sum(plain[250:395]) > 110
    assert sum(plain[-30:]) < 5
    assert drafter.size >= 8


def test_a_slower_machine_changes_nothing(simulate):
    def change(clock, i):
        clock.slowness = 5.0 if i > 60 else 1.0

    _, steady, _ = simulate(middling, known=middling)
    _, slowed, target = simulate(middling, known=middling, change=change)
    assert abs(SIZES.index(steady.size) - SIZES.index(slowed.size)) <= 1
    assert max(target.sizes[-50:]) < 30


def test_acceptance_counts_what_was_never_verified():
    """The nodes cut off are judged too; a text shifted by one is the negative control."""
    shape = TreeShape(RANKED, "cpu")
    rng = torch.Generator().manual_seed(1)

    def expected(shift):
        acceptance = AcceptanceRates([0.0] * 80, "cpu")
        hits = torch.zeros(80)
        watched = 0
        for step in range(400):
            tokens = torch.randint(0, 3, (1, 81), generator=rng)
            text = torch.randint(0, 3, (8,), generator=rng).tolist()
            acceptance.watch(shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool)))
            if (step + 1) % EVERY:
                continue
            watched += 1
            acceptance.follow(told(PATH, [text[:3]], [None], [0]))
            acceptance.follow(told(PATH, [text[3:]], ["length"], [0]))
            hits *= 1 - 1 / 50
            for node, path in enumerate(RANKED.paths, start=1):
                above = [RANKED.paths.index(path[:d]) + 1 for d in range(1, len(path))]
                line = tokens[0, [*above, node]].tolist()
                hits[node - 1] += line == (text[shift:] + text[:shift])[: len(line)]
        weight = (1 - (1 - 1 / 50) ** watched) * 50 + 4
        return acceptance.expected([1, 5, 81])[0], [1, *(1 + hits.cumsum(0)[[3, 79]] / weight)]

    found, right = expected(0)
    assert found == pytest.approx([float(x) for x in right], abs=1e-3)
    found, wrong = expected(1)
    assert found != pytest.approx([float(x) for x in wrong], abs=1e-3)


def test_rows_that_end_early_are_left_out():
    shape = TreeShape(RANKED, "cpu")
    acceptance = AcceptanceRates(RANKED.shares, "cpu")
    tokens = torch.full((2, 81), 7)
    for _ in range(EVERY):
        acceptance.watch(shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    acceptance.follow(told(PATH.repeat(2, 1), [[7] * 8, [7]], [None, "eos"], [0, 0]))
    mats, nodes = acceptance.expected([1, 81])
    assert mats[0] == nodes[0] == 1
    before = 1 + sum(RANKED.shares)
    assert mats[1] > before + 5  # one row, all right, not the mean with a row of nothing


def test_pace_measures_relative_to_the_usual_size():
    pace = StepTimer(3, usual=1, trusted=False)
    for slowness in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        pace.note(1, slowness, 1.0, usual=True)
    for _ in range(3):
        pace.note(0, 6.0, 1.0, usual=False)
    assert pace.correction(0) == pytest.approx(0.693, abs=1e-3)  # twice, not six times
    assert pace.correction(1) == 0
    assert pace.correction(2) == 0
    pace.note(1, 1e9, 1.0, usual=True)  # a hiccup
    assert pace.correction(0) == pytest.approx(0.693, abs=1e-3)


def test_batches_with_any_sizes_are_lossless():
    """Whatever sizes are chosen, from step to step."""

    class Wild(AutoSize):
        def _best(self, *offer):
            super()._best(*offer)
            return random.randrange(len(self.sizes))

    random.seed(3)
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    for inner in (
        PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), RANKED),
        PromptLookupDrafter(),
    ):
        drafter = Wild(inner, CostCurve.assumed("cpu"))
        limits = [30, 50, 41]
        texts = [[], [], []]
        counts = list(limits)

        def stop(row, token, counts=counts):
            counts[row] -= 1
            return None if counts[row] else "length"

        for step in decode(ToyTarget(by_last), drafter, GreedyAcceptor(), prompts, stop):
            for row, tokens in enumerate(step.tokens):
                texts[row] += tokens
        assert texts == [plain_greedy(p, n, by_last) for p, n in zip(prompts, limits)]


def test_what_the_library_does_by_itself(bundled):
    automatic = TokenRecycling(bundled.model, bundled.tokenizer)
    assert isinstance(automatic.drafter, AutoSize)
    assert automatic.template.name == "auto"
    assert isinstance(automatic.drafter.drafter, AdaptiveDrafter)
    named = TokenRecycling(bundled.model, bundled.tokenizer, drafter="paper", tree="paper")
    assert isinstance(named.drafter, PaperDrafter)
    none = TokenRecycling(bundled.model, bundled.tokenizer, drafter="none")
    assert isinstance(none.drafter, NoDrafter)
    few = TokenRecycling(bundled.model, bundled.tokenizer, k=1)
    prompt = random_prompts([9])[0]
    answers = [r.generate(prompt, max_new_tokens=30).token_ids for r in (automatic, few, none)]
    assert answers[0] == answers[1] == answers[2]


def test_a_dear_machine_decodes_plainly(bundled):
    """The curve given is believed until the steps say otherwise."""
    dear = TokenRecycling(bundled.model, bundled.tokenizer, costs=curve(lambda n: float(n) ** 2))
    answer = dear.generate("Once upon a time", max_new_tokens=20)
    assert dear.drafter.size == 1
    assert answer.stats.mat < 1.5


def test_a_drafter_whose_nodes_have_no_order_is_refused():
    paper = PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("paper"))
    with pytest.raises(TokenRecyclingError, match="cannot be cut"):
        AutoSize(paper, CostCurve.assumed("cpu"))
