"""The size of the draft follows costs and text; on a clock that the tests turn themselves."""

import random

import pytest

from models import random_prompts
from token_recycling import (
    AdjacencyMatrix,
    TokenRecycling,
    TokenRecyclingError,
    TreeTemplate,
)
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.loop import Decoding
from token_recycling.decoding.sequence import Sequence, at_most
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.drafting.size.base import FixedSize
from token_recycling.drafting.size.costs import CostCurve
from toy import VOCABULARY, ToyTarget, next_logits, plain_greedy

RANKED = TreeTemplate.load("ranked", 8).first(80)

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81)


def by_last(context):
    """Logits of the last token alone: the matrix knows them once it has seen the token."""
    return next_logits(context[-1:])


class Clock:
    """Time that passes only in ``verify``."""

    def __init__(self, cost):
        self.now, self.cost = 0.0, cost

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
        self.clock.now += self.clock.cost(size) * noise
        return super().verify(draft)


def curve(cost):
    return CostCurve(SIZES, tuple(map(cost, SIZES)))


@pytest.fixture
def simulate(monkeypatch):
    """Decode ``n`` tokens; return (tokens per second in the second half, policy, target)."""
    random.seed(0)

    def run(cost, *, known=None, logits=by_last, n=250, size=None):
        clock = Clock(cost)
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(f"token_recycling.decoding.loop.{name}", clock)
        target = TimedTarget(clock, logits)
        drafter = PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), RANKED)
        if size is None:
            guess = CostCurve.assumed("cpu") if known is None else curve(known)
            policy = AutoSize(drafter.acceptance, guess)
        else:
            policy = FixedSize(size)
        prompt = [3, 1, 4]
        decoding = Decoding(
            target, drafter, policy, GreedyAcceptor(), [Sequence(prompt, [at_most(n)])]
        )
        found, half = [], None
        for step in decoding.steps():
            found += step.tokens[0]
            if half is None and len(found) >= n // 2:
                half = (len(found), clock.now)
        assert found == plain_greedy(prompt, n, logits)
        return (len(found) - half[0]) / (clock.now - half[1]), policy, target

    return run


def flat(n):
    return 1.0 + 0.001 * n


def steep(n):
    return float(n)


def middling(n):
    return 1.0 + 0.06 * (n - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logits", "measured", "cost"),
    [
        *((by_last, True, cost) for cost in (flat, middling, steep)),
        *((by_last, False, cost) for cost in (flat, steep)),
        *((next_logits, True, cost) for cost in (flat, steep)),
    ],
)
def test_the_speed_is_that_of_the_best_size(simulate, logits, measured, cost):
    speeds = {size: simulate(cost, logits=logits, size=size)[0] for size in (1, 8, 16, 81)}
    # These drafts have no scores, and more is accepted than the acceptance probabilities say.
    known, n, least = (cost, 400, 0.82) if measured else (None, 3000, 0.75)
    speed, policy, _ = simulate(cost, known=known, logits=logits, n=n)
    assert speed > least * max(speeds.values()), (policy.typical(), speeds)
    worst = min(speeds.values())
    assert worst < 0.75 * max(speeds.values())  # or any choice would have passed


def test_batches_with_any_sizes_are_lossless():
    """Whatever sizes are chosen, from step to step."""

    class Wild(AutoSize):
        def limit(self):
            return random.randrange(1, self.most)

        def choose(self, draft):
            super().choose(draft)
            return random.randint(1, draft.size)

    random.seed(3)
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    for drafter in (
        PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), RANKED),
        PromptLookupDrafter(),
    ):
        limits = [30, 50, 41]
        sequences = [Sequence(p, [at_most(limit)]) for p, limit in zip(prompts, limits)]
        policy = Wild(drafter.acceptance, CostCurve.assumed("cpu"))
        texts, sizes = [[], [], []], set()
        decoding = Decoding(ToyTarget(by_last), drafter, policy, GreedyAcceptor(), sequences)
        for step in decoding.steps():
            sizes.add(step.size)
            for row, tokens in enumerate(step.tokens):
                texts[row] += tokens
        assert texts == [plain_greedy(p, n, by_last) for p, n in zip(prompts, limits)]
        assert [sequence.new_tokens for sequence in sequences] == texts
        assert len(sizes) > 3


def test_what_the_library_does_by_itself(bundled):
    automatic = TokenRecycling(bundled.model, bundled.tokenizer)
    assert isinstance(automatic.draft_size, AutoSize)
    assert automatic.session.template is None
    assert isinstance(automatic.drafter, AdaptiveDrafter)
    named = TokenRecycling(bundled.model, bundled.tokenizer, drafter="paper")
    assert isinstance(named.drafter, PaperDrafter)
    none = TokenRecycling(bundled.model, bundled.tokenizer, drafter="none")
    assert isinstance(none.drafter, NoDrafter)
    for fixed in (named, none):
        assert isinstance(fixed.draft_size, FixedSize)
        assert fixed.draft_size.limit() is None
    few = TokenRecycling(bundled.model, bundled.tokenizer, k=1)
    prompt = random_prompts([9])[0]
    answers = [r.generate(prompt, max_new_tokens=30).token_ids for r in (automatic, few, none)]
    assert answers[0] == answers[1] == answers[2]


def test_an_expensive_machine_decodes_plainly(bundled):
    """The curve given is believed until the steps say otherwise."""
    expensive = TokenRecycling(bundled.model, bundled.tokenizer)
    costs = curve(lambda n: float(n) ** 2)
    expensive.session.draft_size = AutoSize(expensive.drafter.acceptance, costs)
    answer = expensive.generate("Once upon a time", max_new_tokens=20)
    assert expensive.draft_size.typical() == 1
    assert answer.stats.mat < 1.5


def test_a_drafter_whose_nodes_have_no_order_is_refused():
    paper = PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("paper"))
    with pytest.raises(TokenRecyclingError, match="cannot be truncated"):
        AutoSize(paper.acceptance, CostCurve.assumed("cpu"))


def test_drafts_of_other_sizes_than_the_drafter_expects():
    """A drafter may propose fewer nodes than it has acceptance probabilities, or more."""
    random.seed(1)

    class Moody(PaperDrafter):
        def propose(self, rows, roots, size=None):
            draft = super().propose(rows, roots, size)
            return draft.first(random.choice([1, 2, 5, draft.size]))

        @property
        def acceptance(self):
            return super().acceptance[:30]

    target = ToyTarget(by_last)
    drafter = Moody(AdjacencyMatrix(VOCABULARY, 8), RANKED)
    size = AutoSize(drafter.acceptance, CostCurve.assumed("cuda"))
    sequences = [Sequence([3, 1, 4], [at_most(150)]), Sequence([5], [at_most(120)])]
    steps = list(Decoding(target, drafter, size, GreedyAcceptor(), sequences).steps())
    assert sequences[0].new_tokens == plain_greedy([3, 1, 4], 150, by_last)
    assert sequences[1].new_tokens == plain_greedy([5], 120, by_last)
    assert max(step.size for step in steps) <= 31
    assert len({step.size for step in steps}) > 2
