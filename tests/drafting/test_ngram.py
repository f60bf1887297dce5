"""The tokens of each row, and what followed their last n-gram before, against a plain search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.ngram import ROOM, Context
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.util.tokens import NO_TOKEN

texts_of_rows = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=3
)


def search(text, window, length):
    """The tokens after the longest and then latest earlier n-gram, by slices of lists."""
    for run in range(min(window, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, run - 1, -1):
            if text[end - run : end] == text[-run:]:
                return text[end : end + length]
    return []


def loaded(texts, *options):
    context = Context.empty(len(texts), *options)
    context.load(texts)
    return context


def held(context):
    """The tokens of each row; what is behind them is padding."""
    rows = []
    for row, length in zip(context.tokens.tolist(), context.lengths.tolist()):
        rows.append(row[:length])
        assert NO_TOKEN not in rows[-1]
    return rows


def emitted(pieces):
    """Accepted tokens of a step, padded as acceptors pad them."""
    longest = max(1, *map(len, pieces))
    tokens = torch.tensor([piece + [NO_TOKEN] * (longest - len(piece)) for piece in pieces])
    return Accepted(
        torch.zeros_like(tokens), tokens, torch.tensor([len(piece) for piece in pieces])
    )


def check(drafter, rows, texts, roots):
    draft = drafter.propose(rows, torch.tensor(roots))
    for row, (text, root) in enumerate(zip(texts, roots)):
        expected = search([*text, root], drafter.max_ngram, drafter.length)
        found = draft.tokens[row][draft.valid[row]].tolist()
        assert found == [root, *expected]
        assert draft.valid[row, : len(found)].all()
    return draft


@given(texts_of_rows, st.integers(1, 6), st.integers(1, 5))
def test_the_longest_and_latest_match(texts, window, length):
    drafter = PromptLookupDrafter(length=length, max_ngram=window)
    rows = drafter.new_state(len(texts))
    drafter.load(rows, [text[:-1] for text in texts])
    check(drafter, rows, [text[:-1] for text in texts], [text[-1] for text in texts])


def test_of_two_matches_the_later_one_is_copied():
    drafter = PromptLookupDrafter(length=2, max_ngram=2)
    rows = drafter.new_state(1)
    drafter.load(rows, [[1, 2, 5, 6, 1, 2, 7, 8, 1]])
    draft = drafter.propose(rows, torch.tensor([2]))
    assert draft.tokens.tolist() == [[2, 7, 8]]


@pytest.mark.parametrize("capacity", [None, 400])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.lists(st.integers(0, 2), max_size=6),  # no token: the row has ended
        ),
        max_size=12,
    )
)
def test_rows_grow(capacity, steps):
    """Roots and accepted tokens, in rows of different lengths; the second row may end."""
    drafter = PromptLookupDrafter(length=3, max_ngram=4)
    texts = [[0, 1], [1]]
    rows = drafter.new_state(2, capacity)
    drafter.load(rows, texts)
    roots = [2, 0]
    for pieces in steps:
        ended = roots[1] is None
        if ended:  # it stays in the batch; its text no longer matters
            pieces = (pieces[0], [])
            draft = drafter.propose(rows, torch.tensor([roots[0], 0]))
        else:
            draft = check(drafter, rows, texts, roots)
        nothing = best_candidates(torch.zeros(2, draft.size, 3), 0)
        drafter.observe(rows, draft, nothing, emitted(pieces))
        texts = [[*text, root, *piece[:-1]] for text, root, piece in zip(texts, roots, pieces)]
        roots = [piece[-1] if piece else None for piece in pieces]
        assert held(rows)[0] == texts[0]
        assert ended or held(rows)[1] == texts[1]


def test_the_buffer_grows_beyond_its_room():
    text = list(range(50))
    context = loaded([text, [5]])
    for start in range(0, 5 * ROOM, 40):
        more = [1000 + start + i for i in range(41)]
        context.append_accepted(emitted([more, []]))
        text = text + more[:-1]
        assert held(context) == [text, [5]]
    assert context.tokens.shape[1] > 5 * ROOM
    assert context.tokens[1, 1:].eq(NO_TOKEN).all()


def test_with_a_capacity_the_buffer_stays():
    """Shapes and addresses are fixed: the last tokens that fit are kept, with a margin."""
    context = loaded([list(range(100, 150)), [1, 2]], 20, 4)
    address = context.tokens.data_ptr()
    assert held(context) == [list(range(134, 150)), [1, 2]]
    for _ in range(3):
        context.append_roots(torch.tensor([7, 8]))
        context.append_accepted(emitted([[1, 2, 3, 4], [3, 9]]))
    assert context.tokens.shape == (2, 20)
    assert context.tokens.data_ptr() == address
    assert held(context)[0][:19] == [*range(134, 150), 7, 1, 2]  # the last slot may be replaced
    assert held(context)[1] == [1, 2, 8, 3, 8, 3, 8, 3]
    context.load([[5], [6, 7]])
    assert context.tokens.data_ptr() == address
    assert held(context) == [[5], [6, 7]]


def test_a_text_without_a_repetition_matches_nothing():
    drafter = PromptLookupDrafter()
    rows = drafter.new_state(2)
    drafter.load(rows, [[], [1, 2]])
    draft = drafter.propose(rows, torch.tensor([3, 4]))
    assert draft.valid.sum(dim=1).tolist() == [1, 1]
    assert held(rows) == [[3], [1, 2, 4]]
