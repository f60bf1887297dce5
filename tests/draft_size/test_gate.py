"""The speculation gate of graph steps: drafts of one size, or plain decoding."""

from token_recycling import TreeTemplate
from token_recycling.draft_size.auto import AutoSize
from token_recycling.draft_size.base import FixedSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.draft_size.gate import COOLDOWN, LONGEST_COOLDOWN, TRIAL, SpeculationGate
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence

RANKED = TreeTemplate.load("ranked", 8).first(80)


def append(sequence, tokens):
    for token in tokens:
        sequence.append(token)


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
    policy = AutoSize(RANKED.acceptance, CostCurve.assumed("cuda"))
    gate = policy.for_graph()
    assert isinstance(gate, SpeculationGate)
    assert gate.limit() == gate.size == policy.size > 1
    assert gate.costs is policy.costs
