"""What followed the last n-gram before, against a search written as plainly as can be."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.drafters.ngram import ROOM, Context, NgramMatcher

rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=3)


def search(row, window, length, least):
    """(tokens, run) of the longest and then latest earlier n-gram, by slices of lists."""
    for run in range(window, least - 1, -1):
        for end in range(len(row) - 1, run - 1, -1):
            if row[end - run : end] == row[-run:]:
                return row[end : end + length], run
    return [], 0


def context_of(texts, window, **options):
    context = Context.empty(len(texts), window, "cpu", **options)
    context.load(texts)
    return context


def match(context, length, least=1):
    return NgramMatcher(context.window, "cpu")(context, length, least)


def check(context, texts, length, least):
    found = match(context, length, least)
    for b, text in enumerate(texts):
        expected, run = search(text, context.window, length, least)
        assert found.tokens[b, : len(expected)].tolist() == expected
        assert found.valid[b].tolist() == [i < len(expected) for i in range(length)]
        assert found.run[b] == run


@given(rows, st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_the_longest_and_latest_match(texts, window, length, least):
    check(context_of(texts, window), texts, length, min(least, window))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12), st.integers(2, 4))
def test_rows_grow(pieces, window):
    texts = [[0, 1], [1]]
    context = context_of(texts, window)
    for index, piece in enumerate(pieces):
        count = len(piece) // 2 if index % 2 else len(piece)
        tokens = torch.tensor([piece, piece]).reshape(2, -1).long()
        context.append(tokens, torch.tensor([len(piece), count]))
        texts[0] = texts[0] + piece
        texts[1] = texts[1] + piece[:count]
    check(context, texts, 3, 1)
    for text, last in zip(texts, context.last(1)):
        assert last.tolist() == text[-1:]


def test_the_buffer_grows_beyond_its_room():
    text = list(range(50))
    context = context_of([text], 3)
    for start in range(0, 5 * ROOM, 40):
        more = [1000 + start + i for i in range(40)]
        context.append(torch.tensor([more]), torch.tensor([40]))
        text = text + more
    context.append(torch.tensor([[7, 8, 9]]), torch.tensor([3]))
    check(context, [[*text, 7, 8, 9]], 10, 2)
    assert match(context, 10, 2).tokens[0].tolist() == list(range(10, 20))
