"""The best tokens of logits, against a sort in plain Python."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from token_recycling.drafting import candidates as ranking
from token_recycling.drafting.candidates import BLOCK, top_k

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Few values, so that there are ties; both zeros; values that differ after rounding only in float64.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, 1e-45, -1e-45, 3e38]),
    st.floats(allow_nan=False, width=32),
)
SIZES = st.sampled_from([1, 2, 15, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5, 1000])


def sorted_ids(row, k):
    """Indices of the k largest values, of equal ones the first; -0.0 equals 0.0."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def check(logits, k):
    values, ids = top_k(logits, k)
    assert values.shape == ids.shape == (*logits.shape[:-1], k)
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
    rows = logits.float().reshape(-1, logits.shape[-1]).tolist()
    found = zip(ids.reshape(-1, k).tolist(), values.reshape(-1, k).tolist())
    for row, (indices, best) in zip(rows, found, strict=True):
        assert indices == sorted_ids(row, k)
        assert best == [row[i] for i in indices]


@settings(max_examples=200, deadline=None)
@given(st.data(), SIZES, st.integers(1, 16), st.sampled_from(DTYPES))
def test_the_k_largest_in_order(data, size, k, dtype):
    few = data.draw(st.lists(VALUES, min_size=1, max_size=8))
    order = data.draw(st.randoms(use_true_random=False))
    rows = [[order.choice(few) for _ in range(size)] for _ in range(3)]
    check(torch.tensor(rows, dtype=torch.float64).to(dtype), min(k, size))


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 16), st.sampled_from(DTYPES), st.integers(0, 2**30))
@example(4 * BLOCK, 16, torch.float32, 0)
def test_random_logits(size, k, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, size, generator=rng) * 10
    check(logits.to(dtype), min(k, size))


@pytest.mark.parametrize("size", [5, BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("value", [0.0, -0.0, -math.inf, math.inf, -3.0])
def test_of_equal_values_the_first(size, value):
    values, ids = top_k(torch.full((1, size), value), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    assert values.tolist() == [[value] * 5]


def test_zeros_of_both_signs_are_equal():
    logits = torch.full((1, 3 * BLOCK), -1.0)
    places = [3, BLOCK + 1, BLOCK + 9, 2 * BLOCK]
    for i, place in enumerate(places):
        logits[0, place] = -0.0 if i % 2 == 0 else 0.0
    assert top_k(logits, 4)[1].tolist() == [places]


def test_the_bound_of_a_block_in_the_middle_of_ties():
    """The k-th largest maximum is shared by more blocks than there are places."""
    logits = torch.zeros(1, 8 * BLOCK)
    logits[0, BLOCK - 1 :: BLOCK] = 1.0  # eight blocks, one such value each
    check(logits, 3)
    logits[0, 5 * BLOCK + 3] = 2.0
    check(logits, 3)


def test_all_of_the_vocabulary():
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0]])
    assert top_k(logits, 4)[1].tolist() == [[1, 3, 0, 2]]


def test_strided_logits_and_those_with_a_gradient():
    """As a slice of a wider LM head gives them."""
    wide = torch.randn(2, 4, 200, requires_grad=True)
    check(wide[..., :150].detach(), 7)
    assert (
        top_k(wide[:, 1:3, :150], 7)[1].tolist() == top_k(wide[:, 1:3, :150].clone(), 7)[1].tolist()
    )
    assert top_k(wide[0, 0], 3)[1].shape == (3,)


def test_rows_with_nan_leave_others_alone():
    logits = torch.randn(3, 500)
    expected = top_k(logits, 8)[1]
    logits[1] = math.nan
    _, ids = top_k(logits, 8)
    assert ids[[0, 2]].equal(expected[[0, 2]])
    assert bool(((ids >= 0) & (ids < 500)).all())  # undefined order, but indices of the row


def test_a_wrong_order_is_noticed(monkeypatch):
    """Negative control."""
    right = ranking._ids
    monkeypatch.setattr(ranking, "_ids", lambda rows, k: right(rows, k)[:, ::-1].copy())
    with pytest.raises(AssertionError):
        check(torch.randn(2, 300), 4)
