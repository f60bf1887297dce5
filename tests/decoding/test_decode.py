"""The loop on toy targets: what is emitted never depends on the drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import Oracle
from strategies import templates
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.loop import Decoding
from token_recycling.decoding.sequence import Sequence, at_most, at_token
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.drafting.size.base import FixedSize
from token_recycling.drafting.templates import TreeTemplate
from toy import VOCABULARY, ScriptedDrafter, ToyTarget, next_logits, plain_greedy


def run(target, drafter, prompts, limits, eos=()):
    sequences = [
        Sequence(prompt, [at_most(limit), at_token(eos)])
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    decoding = Decoding(target, drafter, FixedSize(), GreedyAcceptor(), sequences)
    steps = list(decoding.steps())
    for row, sequence in enumerate(sequences):
        assert sequence.new_tokens == [t for step in steps for t in step.tokens[row]]
    tokens = [[t for step in steps for t in step.tokens[row]] for row in range(len(prompts))]
    reasons = [[s.reasons[row] for s in steps if s.reasons[row]] for row in range(len(prompts))]
    return tokens, reasons, steps


@pytest.mark.parametrize(
    ("right", "forwards"),
    [(lambda i: True, 6), (lambda i: False, 29), (lambda i: i % 3 != 0, None)],
)
def test_a_drafter_that_is_always_never_or_sometimes_right(right, forwards):
    target = ToyTarget()
    tokens, reasons, _ = run(target, ScriptedDrafter(target, 4, right), [[3, 1, 4]], [30])
    assert tokens[0] == plain_greedy([3, 1, 4], 30)
    assert reasons == [["length"]]
    if forwards:
        assert target.forwards == forwards  # 29 tokens after the first: 5 a step, or 1 a step


@settings(max_examples=40, deadline=None)
@given(
    templates(),
    st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6), min_size=1, max_size=3
    ),
    st.integers(1, 25),
)
def test_random_trees_and_batches(template, prompts, n):
    matrix = AdjacencyMatrix(VOCABULARY, 5)
    limits = [max(1, n - row) for row in range(len(prompts))]
    tokens, _, _ = run(ToyTarget(), PaperDrafter(matrix, template), prompts, limits)
    for row, prompt in enumerate(prompts):
        assert tokens[row] == plain_greedy(prompt, limits[row])


@pytest.mark.parametrize("name", ["paper", "ranked", "chain-5"])
def test_paper_is_the_published_algorithm_draft_by_draft(name):
    prompt, n, k = [3, 1, 4, 1, 5], 60, 8
    template = TreeTemplate.load(name, k)
    oracle = list(
        Oracle(lambda c: next_logits(c).topk(k).indices.tolist(), template.paths, k).run(prompt, n)
    )

    drafts = []

    class Recording(PaperDrafter):
        def propose(self, rows, roots, size=None):
            draft = super().propose(rows, roots, size)
            paths = [(), *self.template.paths]
            kept = draft.valid[0].nonzero()[:, 0].tolist()
            drafts.append({paths[i]: int(draft.tokens[0, i]) for i in kept})
            return draft

    drafter = Recording(AdjacencyMatrix(VOCABULARY, k), template)
    _, _, steps = run(ToyTarget(), drafter, [prompt], [n])
    assert [step.tokens[0] for step in steps] == [emitted for _, emitted in oracle]
    assert drafts == [tree for tree, _ in oracle[1:]]
    assert max(len(tree) for tree in drafts) > 5


def test_without_learning_from_the_prompt_the_first_draft_is_empty():
    drafter = PaperDrafter(
        AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("paper"), prompts="none"
    )
    _, _, steps = run(ToyTarget(), drafter, [[3, 1, 4]], [5])
    assert steps[1].drafted == [0]
    assert steps[1].size == 1


def test_eos_in_the_middle_of_an_accepted_path_and_as_the_first_token():
    answer = plain_greedy([3, 1, 4], 30)
    for at in range(12):
        eos = answer[at]
        first = answer.index(eos)
        target = ToyTarget()
        drafter = ScriptedDrafter(target, 6, lambda i: True)
        tokens, reasons, _ = run(target, drafter, [[3, 1, 4]], [30], {eos, 99})
        assert tokens[0] == answer[: first + 1]
        assert reasons == [["eos"]]
        # the last token is emitted, not committed: the cache ends in front of it
        assert target.rows[0] == [3, 1, 4, *answer[:first]]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_the_limit_cuts_an_accepted_path(limit):
    target = ToyTarget()
    tokens, _, _ = run(target, ScriptedDrafter(target, 6, lambda i: True), [[3, 1, 4]], [limit])
    assert tokens[0] == plain_greedy([3, 1, 4], limit)
    assert target.rows[0] == [3, 1, 4, *tokens[0][:-1]]


def test_stopping_early_leaves_target_and_drafter_valid():
    for stop_after in range(1, 6):
        target = ToyTarget()
        drafter = ScriptedDrafter(target, 3, lambda i: i % 2 == 0)
        sequence = Sequence([3, 1, 4], [at_most(50)])
        steps = Decoding(target, drafter, FixedSize(), GreedyAcceptor(), [sequence]).steps()
        seen = []
        for _, step in zip(range(stop_after), steps):
            seen += step.tokens[0]
        steps.close()
        assert target.rows[0] == [3, 1, 4, *seen[:-1]]
        assert sequence.tokens == [3, 1, 4, *seen]


def test_rows_that_end_early_teach_nothing_and_disturb_nobody():
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    limits = [2, 40, 9]
    matrix = AdjacencyMatrix(VOCABULARY, 5)
    tokens, reasons, steps = run(
        ToyTarget(), PaperDrafter(matrix, TreeTemplate.load("ranked").first(8)), prompts, limits
    )
    assert tokens == [plain_greedy(p, n) for p, n in zip(prompts, limits, strict=True)]
    assert reasons == [["length"]] * 3
    ended = next(i for i, step in enumerate(steps) if step.reasons[0])
    assert all(step.tokens[0] == [] and step.drafted[0] == 0 for step in steps[ended + 1 :])


def test_prompt_lookup_proposes_what_followed_the_longest_and_latest_match():
    drafter = PromptLookupDrafter(length=4, max_ngram=3)
    #                    0  1  2  3  4  5  6  7  8  9 10
    rows = drafter.new_state(2)
    drafter.load(rows, [[5, 1, 2, 3, 9, 9, 2, 3, 7, 1, 2], [8, 8, 1, 2, 3, 4, 5, 6, 7, 9, 0]])
    draft = drafter.propose(rows, torch.tensor([3, 1]))
    # row 0 ends in 1 2 3: followed by 9 9 2 3; row 1 ends in 1 (seen once): 2 3 4 5
    assert draft.tokens.tolist() == [[3, 9, 9, 2, 3], [1, 2, 3, 4, 5]]
    assert draft.valid.all()


def test_prompt_lookup_does_not_look_beyond_the_context():
    drafter = PromptLookupDrafter(length=4, max_ngram=3)
    rows = drafter.new_state(2)
    drafter.load(rows, [[7, 7], [1, 2]])
    draft = drafter.propose(rows, torch.tensor([7, 3]))
    # 7 7 7: the 7 before the last is followed by one 7, the end; 1 2 3 never came before
    assert draft.valid.tolist() == [[True, True, False, False, False], [True] + [False] * 4]
    assert draft.tokens[0, 1] == 7


def test_prompt_lookup_and_none_are_lossless_too():
    looping = lambda context: next_logits([context[-1] % 5])  # noqa: E731
    for drafter in (PromptLookupDrafter(), NoDrafter()):
        tokens, _, steps = run(ToyTarget(looping), drafter, [[3, 1, 4], [2]], [40, 30])
        assert tokens == [plain_greedy([3, 1, 4], 40, looping), plain_greedy([2], 30, looping)]
    assert len(steps) == 40  # none: a token a step


def test_the_size_learns_nothing_from_the_seconds_of_steps_that_were_prepared():
    class Noting(FixedSize):
        def __init__(self):
            super().__init__()
            self.seconds = []

        def record(self, rows, drafted, emitted, seconds):
            self.seconds.append(seconds)

    target, size = ToyTarget(), Noting()
    steps = Decoding(
        target, NoDrafter(), size, GreedyAcceptor(), [Sequence([1], [at_most(6)])]
    ).steps()
    next(steps)
    for warm in (True, False, True):
        target.is_warm = warm
        next(steps)
    target.is_warm = True
    list(steps)
    assert [one is None for one in size.seconds] == [False, True, False, False, False]
