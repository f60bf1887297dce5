"""Acceptance: greedy against a walk by hand, sampling against the exact distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import templates
from token_recycling.decoding.accept import (
    FollowAcceptor,
    GreedyAcceptor,
    accept_and_append,
    accept_choices,
)
from token_recycling.decoding.samplers import RowSampler
from token_recycling.decoding.sequence import Sequence, at_token
from token_recycling.decoding.walks import longest_paths
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.util.tokens import NO_TOKEN


def walk(draft, row, choices):
    """All nodes reached from the root by the choices; the deepest path, the first of equals."""
    if not draft.valid[row, 0]:
        return []
    best = [0]

    def visit(path):
        nonlocal best
        if len(path) > len(best):
            best = path
        for node in range(1, draft.tokens.shape[1]):
            if (
                int(draft.parents[row, node]) == path[-1]
                and draft.valid[row, node]
                and draft.tokens[row, node] == choices[row, path[-1]]
            ):
                visit([*path, node])

    visit([0])
    return best


@settings(max_examples=150, deadline=None)
@given(templates(), st.integers(0, 2**30))
def test_the_longest_path_is_the_one_walked_by_hand(template, seed):
    rng = torch.Generator().manual_seed(seed)
    shape = TreeShape(template, "cpu")
    tokens = torch.randint(0, 3, (3, template.size), generator=rng)
    choices = torch.randint(0, 3, (3, template.size), generator=rng)
    valid = torch.rand(tokens.shape, generator=rng) < 0.9
    draft = shape.draft(tokens, valid)
    path, counts = longest_paths(draft, choices)
    for row in range(3):
        expected = walk(draft, row, choices)
        assert int(counts[row]) == len(expected)
        found = path[row, : len(expected)].tolist()
        assert [choices[row, i] for i in found] == [choices[row, i] for i in expected]
        assert all(int(draft.depths[row, node]) == i for i, node in enumerate(found))


def random_drafts(template, seed, batch=3):
    """Drafts with few different tokens, so that siblings repeat, and choices along them.

    Some nodes are invalid, with all nodes below them; some rows have ended.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = TreeShape(template, "cpu")
    tokens = torch.randint(0, 3, (batch, template.size), generator=rng)
    choices = torch.randint(0, 3, (batch, template.size), generator=rng)
    cut = torch.rand(tokens.shape, generator=rng) < 0.1
    valid = ~(shape.ancestors & cut[:, None, :]).any(dim=2)
    return shape.draft(tokens, valid), choices


@settings(max_examples=150, deadline=None)
@given(templates(), st.integers(0, 2**30))
def test_the_compiled_walk_accepts_what_the_tensor_operations_accept(template, seed):
    draft, choices = random_drafts(template, seed)
    sequences = [Sequence([row]) for row in range(3)]
    found, appended = accept_and_append(draft, choices, sequences)
    expected = accept_choices(draft, choices)
    path, counts = longest_paths(draft, choices)
    longest = max(1, int(counts.max()))
    assert found.path.equal(path[:, :longest])
    assert found.emitted.equal(expected.emitted[:, :longest])
    assert found.counts.equal(counts)
    kept = [[token for token in row if token != NO_TOKEN] for row in expected.emitted.tolist()]
    assert appended.tokens == [sequence.new_tokens for sequence in sequences] == kept
    assert [found.tokens(row) for row in range(3)] == kept
    assert appended.drafted == [max(n - 1, 0) for n in draft.valid.sum(dim=1).tolist()]
    for row in range(3):  # and what a walk by hand accepts
        assert found.path[row, : int(counts[row])].tolist() == walk(draft, row, choices)
        assert not found.path[row, int(counts[row]) :].any()


def test_of_equal_siblings_the_first_is_accepted():
    shape = TreeShape(TreeTemplate.from_paths("t", [[0], [1], [2], [1, 0], [2, 0]]), "cpu")
    tokens = torch.tensor([[7, 4, 4, 4, 5, 5]])
    choices = torch.tensor([[4, 5, 5, 5, 6, 6]])
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    found, appended = accept_and_append(draft, choices, [Sequence([7])])
    assert found.path.tolist() == [[0, 2, 4]]  # node 1 is first, but nothing is below it
    assert appended.tokens == [[4, 5, 6]]


def test_what_follows_the_end_of_a_row_is_not_emitted():
    shape = TreeShape(TreeTemplate.chain(3), "cpu")
    tokens = torch.tensor([[0, 1, 2, 1], [0, 1, 2, 1]])
    choices = torch.tensor([[1, 2, 1, 9], [1, 2, 1, 9]])
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    sequences = [Sequence([0], [at_token({2})]), Sequence([0])]
    accepted, appended = accept_and_append(draft, choices, sequences)
    assert appended.tokens == [[1, 2], [1, 2, 1, 9]]
    assert accepted.emitted.tolist() == [[1, 2, NO_TOKEN, NO_TOKEN], [1, 2, 1, 9]]
    assert accepted.counts.tolist() == [2, 4]
    assert [reason is not None for reason in appended.reasons] == [True, False]
    assert sequences[0].new_tokens == [1, 2]
    accepted, appended = accept_and_append(draft, choices, sequences)  # the first row has ended
    assert appended.tokens == [[], [1, 2, 1, 9]]
    assert accepted.counts.tolist() == [0, 4]
    assert appended.drafted == [0, 3]


def test_greedy_and_following_the_argmax_agree():
    template = TreeTemplate.load("paper")
    shape = TreeShape(template, "cpu")
    for seed in range(20):
        torch.manual_seed(seed)
        # siblings differ in their tokens, as the candidates of one row do
        ranks = [0, *(path[-1] for path in template.paths)]
        tokens = (torch.tensor([ranks] * 2) + torch.randint(0, 8, (2, 1))) % 8
        draft = shape.draft(tokens, torch.rand(tokens.shape) < 0.95)
        logits = torch.randn(2, template.size, 8)
        follow = FollowAcceptor([lambda ids, scores: scores] * 2, None)
        _, one = GreedyAcceptor()(draft, logits, [Sequence([0]), Sequence([1])])
        _, two = follow(draft, logits, [Sequence([0]), Sequence([1])])
        assert one.tokens == two.tokens
        assert one.drafted == two.drafted


@pytest.mark.parametrize("drafted", [[0, 1, 2], [3], [2, 3]])
def test_sampling_keeps_the_targets_distribution(drafted):
    """Chi-squared over 20,000 draws of two tokens; what is drafted must not matter."""
    paths = [[i] for i in range(len(drafted))]
    shape = TreeShape(TreeTemplate.from_paths("t", paths), "cpu")
    tokens = torch.tensor([[0, *drafted]])
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    torch.manual_seed(0)
    logits = torch.randn(1, len(drafted) + 1, 4)
    n, counts = 20_000, torch.zeros(4)
    generator = torch.Generator().manual_seed(1)
    seconds = {token: torch.zeros(4) for token in drafted}
    for _ in range(n):
        accept = FollowAcceptor([lambda ids, scores: scores], RowSampler([generator]))
        _, appended = accept(draft, logits, [Sequence([0])])
        (emitted,) = appended.tokens
        counts[emitted[0]] += 1
        assert (len(emitted) == 2) == (emitted[0] in drafted)
        if len(emitted) == 2:
            seconds[emitted[0]][emitted[1]] += 1

    def chi_squared(found, logits):
        expected = logits.softmax(-1) * found.sum()
        return float(((found - expected) ** 2 / expected).sum())

    limit = 16.3  # 99.9 % of chi-squared with 3 degrees of freedom
    assert chi_squared(counts, logits[0, 0]) < limit
    for i, token in enumerate(drafted):
        assert chi_squared(seconds[token], logits[0, i + 1]) < limit
    # negative control: the wrong node's distribution is told apart
    assert chi_squared(counts, logits[0, 1]) > limit


def test_processors_see_the_walked_path_only():
    shape = TreeShape(TreeTemplate.from_paths("t", [[0], [1], [0, 0]]), "cpu")
    tokens = torch.tensor([[7, 1, 2, 3]])
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    logits = torch.full((1, 4, 9), -9.0)
    for node, token in enumerate([1, 3, 8, 5]):
        logits[0, node, token] = 9.0
    seen = []

    def processor(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    sequence = Sequence([4, 7])
    accepted, appended = FollowAcceptor([processor], None)(draft, logits, [sequence])
    assert sequence.new_tokens == [1, 3, 5]
    assert appended.tokens == [[1, 3, 5]]
    assert accepted.path[0, :3].tolist() == [0, 1, 3]
    assert seen == [[4, 7], [4, 7, 1], [4, 7, 1, 3]]


def test_following_stops_drawing_at_the_end():
    shape = TreeShape(TreeTemplate.chain(3), "cpu")
    tokens = torch.tensor([[0, 1, 1, 1]])
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    logits = torch.zeros(1, 4, 3)
    logits[..., 1] = 50.0
    generator = torch.Generator().manual_seed(0)
    accept = FollowAcceptor([lambda ids, scores: scores], RowSampler([generator]))
    _, appended = accept(draft, logits, [Sequence([0], [lambda row: "eos"])])
    assert appended.tokens == [[1]]
    spent = torch.Generator().manual_seed(0)
    torch.multinomial(torch.ones(1, 3), 1, generator=spent)
    assert torch.equal(generator.get_state(), spent.get_state())
