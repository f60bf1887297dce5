"""The size of the draft follows costs and text; on a clock that the tests turn themselves."""

import random

import pytest
import torch

from models import random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError, TreeTemplate
from token_recycling.accept import GreedyAcceptor
from token_recycling.decode import Decoding
from token_recycling.draft_size.acceptance import EVERY, AcceptanceRates
from token_recycling.draft_size.auto import AutoSize
from token_recycling.draft_size.base import FixedSize
from token_recycling.draft_size.costs import SIZES, CostCurve
from token_recycling.draft_size.gate import COOLDOWN, LONGEST_COOLDOWN, TRIAL, SpeculationGate
from token_recycling.draft_size.timer import StepTimer
from token_recycling.drafters import (
    AdaptiveDrafter,
    NoDrafter,
    PaperDrafter,
    PromptLookupDrafter,
)
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence, at_most, at_token
from token_recycling.tree import TreeShape
from toy import VOCABULARY, ToyTarget, next_logits, plain_greedy

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
    """Decode ``n`` tokens; return (tokens per second in the second half, policy, target)."""
    random.seed(0)

    def run(cost, *, known=None, logits=by_last, n=250, size=None, change=lambda clock, i: None):
        clock = Clock(cost)
        monkeypatch.setattr("token_recycling.decode.perf_counter", clock)
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
        for i, step in enumerate(decoding.steps()):
            change(clock, i)
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
    speed, policy, _ = simulate(cost, known=known, logits=logits, n=n)
    assert speed > least * max(speeds.values()), (policy.size, speeds)
    worst = min(speeds.values())
    assert worst < 0.75 * max(speeds.values())  # or any choice would have passed


def test_steps_down_to_plain_decoding_and_comes_back(simulate):
    """Verifying becomes expensive, then cheap again."""
    expensive = {"now": False}

    def cost(n):
        return float(n) if expensive["now"] else flat(n)

    def change(clock, i):
        expensive["now"] = 60 <= i < 400

    _, policy, target = simulate(cost, known=flat, n=3000, change=change)
    plain = [size == 1 for size in target.sizes]
    assert sum(plain[10:55]) < 5
    assert sum(plain[250:395]) > 110
    assert sum(plain[-30:]) < 5
    assert policy.size >= 8


def test_a_slower_machine_changes_nothing(simulate):
    def change(clock, i):
        clock.slowness = 5.0 if i > 60 else 1.0

    _, steady, _ = simulate(middling, known=middling)
    _, slowed, target = simulate(middling, known=middling, change=change)
    assert abs(SIZES.index(steady.size) - SIZES.index(slowed.size)) <= 1
    assert max(target.sizes[-50:]) < 30


def append(sequence, tokens):
    for token in tokens:
        sequence.append(token)


def test_acceptance_counts_what_was_never_verified():
    """The nodes cut off are judged too; a text shifted by one is the negative control."""
    shape = TreeShape(RANKED, "cpu")
    rng = torch.Generator().manual_seed(1)

    def expected(shift):
        rates = AcceptanceRates((0.0,) * 80, "cpu")
        hits = torch.zeros(80)
        watched = 0
        for step in range(400):
            tokens = torch.randint(0, 3, (1, 81), generator=rng)
            text = torch.randint(0, 3, (8,), generator=rng).tolist()
            sequences = [Sequence([0, 0], [at_most(8)])]
            draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
            rates.watch(draft, sequences)
            if (step + 1) % EVERY:
                continue
            watched += 1
            append(sequences[0], text[:3])
            assert not rates.judge(sequences)  # too little text so far
            append(sequences[0], text[3:])
            assert rates.judge(sequences)
            hits *= 1 - 1 / 50
            for node, path in enumerate(RANKED.paths, start=1):
                above = [RANKED.paths.index(path[:d]) + 1 for d in range(1, len(path))]
                line = tokens[0, [*above, node]].tolist()
                hits[node - 1] += line == (text[shift:] + text[:shift])[: len(line)]
        weight = (1 - (1 - 1 / 50) ** watched) * 50 + 4
        return rates.expected([1, 5, 81])[0], [1, *(1 + hits.cumsum(0)[[3, 79]] / weight)]

    found, right = expected(0)
    assert found == pytest.approx([float(x) for x in right], abs=1e-3)
    found, wrong = expected(1)
    assert found != pytest.approx([float(x) for x in wrong], abs=1e-3)


def test_rows_that_end_early_are_left_out():
    shape = TreeShape(RANKED, "cpu")
    rates = AcceptanceRates(RANKED.acceptance, "cpu")
    tokens = torch.full((2, 81), 7)
    sequences = [Sequence([1, 2]), Sequence([1], [at_token([7])])]
    for _ in range(EVERY):
        rates.watch(shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool)), sequences)
    append(sequences[0], [7] * 8)
    assert not rates.judge(sequences)  # the other row may still become long enough
    append(sequences[1], [7])
    assert sequences[1].finish_reason == "eos"
    assert rates.judge(sequences)
    mats, nodes = rates.expected([1, 81])
    assert mats[0] == nodes[0] == 1
    before = 1 + sum(RANKED.acceptance)
    assert mats[1] > before + 5  # one row, all right, not the mean with a row of nothing


def test_the_timer_measures_relative_to_the_usual_size():
    timer = StepTimer(3, usual=1, trusted=False)
    for slowness in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        timer.record(1, slowness, 1.0, usual=True)
    for _ in range(3):
        timer.record(0, 6.0, 1.0, usual=False)
    assert timer.correction(0) == pytest.approx(0.693, abs=1e-3)  # twice, not six times
    assert timer.correction(1) == 0
    assert timer.correction(2) == 0
    timer.record(1, 1e9, 1.0, usual=True)  # a hiccup
    assert timer.correction(0) == pytest.approx(0.693, abs=1e-3)


def test_batches_with_any_sizes_are_lossless():
    """Whatever sizes are chosen, from step to step."""

    class Wild(AutoSize):
        def _best(self, *offer):
            super()._best(*offer)
            return random.randrange(len(self.sizes))

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
            sizes.add(step.nodes)
            for row, tokens in enumerate(step.tokens):
                texts[row] += tokens
        assert texts == [plain_greedy(p, n, by_last) for p, n in zip(prompts, limits)]
        assert [sequence.new_tokens for sequence in sequences] == texts
        assert len(sizes) > 3


def test_what_the_library_does_by_itself(bundled):
    automatic = TokenRecycling(bundled.model, bundled.tokenizer)
    assert isinstance(automatic.draft_size, AutoSize)
    assert automatic.template.name == "auto"
    assert isinstance(automatic.drafter, AdaptiveDrafter)
    named = TokenRecycling(bundled.model, bundled.tokenizer, drafter="paper", tree="paper")
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
    costs = curve(lambda n: float(n) ** 2)
    expensive = TokenRecycling(bundled.model, bundled.tokenizer, costs=costs)
    answer = expensive.generate("Once upon a time", max_new_tokens=20)
    assert expensive.draft_size.size == 1
    assert answer.stats.mat < 1.5


def test_a_drafter_whose_nodes_have_no_order_is_refused():
    paper = PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("paper"))
    with pytest.raises(TokenRecyclingError, match="cannot be truncated"):
        AutoSize(paper.acceptance, CostCurve.assumed("cpu"))


# The speculation gate: drafts of one size, or plain decoding

# For ten rows: a plain step costs 1, drafts of 8 tokens cost 2; twice as much at 128 tokens.
GATE_CURVE = CostCurve((1, 10, 80), (64, 128), ((1.0, 1.0, 2.0), (1.0, 1.0, 4.0)))


def rows_of(length, rows=10):
    return [Sequence([0] * length) for _ in range(rows)]


def sizes_taken(gate, sequences, emitted, steps):
    """The sizes of ``steps`` steps; drafts emit ``emitted`` tokens per row, plain steps 1."""
    sizes = []
    for _ in range(steps):
        nodes = gate.limit()
        sizes.append(nodes)
        counts = emitted if nodes > 1 else [min(count, 1) for count in emitted]
        tokens = [[5] * count for count in counts]
        rows = len(tokens)
        step = Step(tokens, [None] * rows, [nodes - 1] * rows, nodes, (0.1,) * 5)
        gate.record(step, sequences)
    return sizes


def test_the_cooldown_grows_until_drafts_pay():
    gate, rows = SpeculationGate(8, GATE_CURVE), rows_of(64)
    trial, cooldown = [8] * TRIAL, COOLDOWN
    cycle = [*trial, *[1] * cooldown, *trial, *[1] * 2 * cooldown]
    assert sizes_taken(gate, rows, [2] * 9 + [1], len(cycle)) == cycle  # 1.9 for a price of 2
    assert sizes_taken(gate, rows, [2] * 9 + [3], 100) == [8] * 100  # 2.1
    assert 1 in sizes_taken(gate, rows, [1] * 10, 100)


def test_success_resets_the_cooldown():
    gate, rows = SpeculationGate(8, GATE_CURVE), rows_of(64)
    few, many = [1] * 10, [8] * 10
    failed = sizes_taken(gate, rows, few, TRIAL + COOLDOWN)
    assert failed == [8] * TRIAL + [1] * COOLDOWN
    assert sizes_taken(gate, rows, many, TRIAL) == [8] * TRIAL
    later = sizes_taken(gate, rows, few, 400)
    first = later.index(1)
    assert later[first : first + COOLDOWN + 1] == [1] * COOLDOWN + [8]


def test_the_cooldown_has_an_upper_limit():
    lengths = [min(COOLDOWN * 2**i, LONGEST_COOLDOWN) for i in range(6)]
    assert lengths[-2:] == [LONGEST_COOLDOWN] * 2
    cycle = [size for length in lengths for size in [8] * TRIAL + [1] * length]
    gate = SpeculationGate(8, GATE_CURVE)
    assert sizes_taken(gate, rows_of(64), [1] * 10, len(cycle)) == cycle


def test_the_gate_leaves_out_rows_that_have_ended():
    """They emit nothing, but are verified with the others, and so are in the price."""
    gate, rows = SpeculationGate(8, GATE_CURVE), rows_of(64)
    assert sizes_taken(gate, rows, [0] * 9 + [3], 100) == [8] * 100
    assert 1 in sizes_taken(gate, rows, [0] * 9 + [1], 100)
    gate = SpeculationGate(8, GATE_CURVE)  # control: one row alone verifies 8 tokens for 1
    assert sizes_taken(gate, rows[:1], [1], 100) == [8] * 100


def test_the_gate_reads_the_longest_context_from_the_sequences():
    gate, rows = SpeculationGate(8, GATE_CURVE), rows_of(64)
    assert sizes_taken(gate, rows, [3] * 10, 100) == [8] * 100
    append(rows[4], [5] * 64)  # drafts now cost 4 plain steps
    assert sizes_taken(gate, rows, [3] * 10, 2) == [8, 1]
    gate = SpeculationGate(8, GATE_CURVE)  # control: so it is from the beginning
    assert sizes_taken(gate, rows_of(128), [3] * 10, TRIAL + 1) == [8] * TRIAL + [1]


def test_only_what_cannot_change_its_size_at_every_step_becomes_a_gate():
    fixed = FixedSize(12)
    assert fixed.for_graph() is fixed
    policy = AutoSize(RANKED.acceptance, curve(flat))
    gate = policy.for_graph()
    assert isinstance(gate, SpeculationGate)
    assert gate.limit() == gate.size == policy.size > 1
    assert gate.costs is policy.costs


def test_drafts_of_other_sizes_than_the_drafter_expects():
    """A drafter may propose fewer nodes than it has acceptance probabilities, or more."""
    random.seed(1)

    class Moody(PaperDrafter):
        def propose(self, rows, roots, nodes=None):
            draft = super().propose(rows, roots, nodes)
            return draft.first(random.choice([1, 2, 5, draft.nodes]))

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
    assert max(step.nodes for step in steps) <= 31
    assert len({step.nodes for step in steps}) > 2


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ("costs.json", "costs has type str; it must be a CostCurve"),
        (CostCurve((8, 16), (0,), ((1.0, 2.0),)), "must include the size 1"),
    ],
)
def test_costs_that_cannot_be_used(bundled, costs, says):
    with pytest.raises(TokenRecyclingError, match=says):
        TokenRecycling(bundled.model, costs=costs)
