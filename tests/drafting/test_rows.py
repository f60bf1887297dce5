"""What a drafter keeps of each row: selected and written by index, whatever a field holds."""

from dataclasses import dataclass

import pytest
import torch

from token_recycling import AdjacencyMatrix
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import DrafterState
from token_recycling.drafting.ngram import Chains, Context
from token_recycling.util.tokens import NO_TOKEN


@dataclass
class Inner(DrafterState):
    counts: torch.Tensor


@dataclass
class Outer(DrafterState):
    tokens: torch.Tensor
    flags: torch.Tensor
    inner: Inner | None
    note: str = ""


def outer(batch, seed=0, *, nested=True):
    rng = torch.Generator().manual_seed(seed)
    return Outer(
        torch.randint(1, 100, (batch, 3), generator=rng),
        torch.ones(batch, 2, 2, dtype=torch.bool),
        Inner(torch.rand(batch, generator=rng) + 1) if nested else None,
        f"of seed {seed}",
    )


def copied(rows):
    return rows.select(torch.arange(len(rows.tokens)))


def same(one, other):
    nested = one.inner is other.inner or one.inner.counts.equal(other.inner.counts)
    return one.tokens.equal(other.tokens) and one.flags.equal(other.flags) and nested


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("index", [[2], [4, 0], [1, 3, 2], [0, 1, 2, 3, 4], []])
def test_rows_written_and_selected_are_equal_and_others_untouched(index, nested):
    rows, new = outer(5, nested=nested), outer(len(index), seed=1, nested=nested)
    before, at = copied(rows), torch.tensor(index, dtype=torch.long)
    assert not index or not same(rows.select(at), new)
    rows.write(at, new)
    assert same(rows.select(at), new)
    others = torch.tensor([i for i in range(5) if i not in index], dtype=torch.long)
    assert same(rows.select(others), before.select(others))
    assert rows.note == "of seed 0"  # belongs to all rows


def test_selected_rows_are_copies_in_the_order_of_the_index():
    rows = outer(5)
    before, index = copied(rows), torch.tensor([3, 1])
    found = rows.select(index)
    assert type(found) is Outer
    assert type(found.inner) is Inner
    assert found.note == rows.note
    assert found.tokens.equal(before.tokens[index])
    assert found.inner.counts.equal(before.inner.counts[index])
    found.tokens.zero_()
    found.flags.zero_()
    found.inner.counts.zero_()
    assert same(rows, before)


def test_none_writes_zeros_into_these_rows_alone():
    rows = outer(5)
    before, index = copied(rows), torch.tensor([1, 4])
    rows.write(index, None)
    found = rows.select(index)
    assert not found.tokens.any()
    assert not found.flags.any()
    assert not found.inner.counts.any()
    others = torch.tensor([0, 2, 3])
    assert same(rows.select(others), before.select(others))
    assert before.tokens.all()  # or nothing was there to be zeroed


def test_nested_rows_that_are_missing_become_zeros():
    rows, new = outer(5), outer(2, seed=1, nested=False)
    before, index = copied(rows), torch.tensor([3, 0])
    rows.write(index, new)
    assert rows.tokens[index].equal(new.tokens)
    assert not rows.inner.counts[index].any()
    others = torch.tensor([1, 2, 4])
    assert same(rows.select(others), before.select(others))


def test_writing_is_in_place():
    """A graph has the addresses of the tensors."""
    rows = outer(5)
    tensors = (rows.tokens, rows.flags, rows.inner.counts)
    addresses = [tensor.data_ptr() for tensor in tensors]
    rows.write(torch.tensor([1, 2]), outer(2, seed=1))
    rows.write(torch.tensor([3]), None)
    now = (rows.tokens, rows.flags, rows.inner.counts)
    assert all(one is other for one, other in zip(now, tensors))
    assert [tensor.data_ptr() for tensor in tensors] == addresses


# Those of the drafters


def test_chains_of_other_rows_are_written():
    many, none = Chains.none(4, 3), Chains.none(1, 3)
    one = Chains(torch.tensor([[7, 8, 0]]), torch.tensor([2]), torch.tensor([5]))
    many.write(torch.tensor([2]), one)
    assert many.runs.tolist() == [0, 0, 5, 0]
    assert many.counts.tolist() == [-1, -1, 2, -1]
    assert many.select(torch.tensor([2])).tokens.equal(one.tokens)
    many.write(torch.tensor([2]), none)
    assert many.counts.tolist() == [-1] * 4
    many.write(torch.tensor([1]), one)
    many.clear()
    assert many.counts.tolist() == [-1] * 4


def test_a_selected_row_has_room_for_a_step():
    """A row with too few free slots forgets its first half; the others stay as they are."""
    context = Context.empty(3, capacity=12, margin=3)
    texts = [[1, 2], list(range(10, 18)), list(range(20, 29))]
    context.load(texts)
    context.append_roots(torch.tensor([3, 18, 29]))
    before = context.tokens.clone()
    found = context.select(torch.tensor([2, 1, 0]))
    assert found.lengths.tolist() == [10, 9, 3]
    found.make_room()
    assert found.lengths.tolist() == [4, 9, 3]
    assert found.tokens[0].tolist() == [26, 27, 28, 29] + [NO_TOKEN] * 8
    assert found.tokens[1].equal(before[1])
    assert found.tokens[2].equal(before[0])
    assert context.tokens.equal(before)
    assert context.lengths.tolist() == [3, 9, 10]
    assert all(found.tokens.shape[1] - length >= 3 for length in found.lengths.tolist())


def test_adaptive_rows_go_through_write_and_select():
    """Two texts, drafted for in rows of their own and in slots of a larger batch."""
    drafter = AdaptiveDrafter(AdjacencyMatrix(50, 4), 12)
    texts, roots = [[5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 4, 9]], torch.tensor([7, 3])
    rows = drafter.new_state(2, 64)
    drafter.load(rows, texts)
    alone = drafter.propose(rows, roots)
    assert alone.valid[:, 1:].any(dim=1).all()  # a chain each

    slots, batch = torch.tensor([3, 1]), drafter.new_state(5, 64)
    fresh = drafter.new_state(2, 64)
    drafter.load(fresh, texts)
    assert fresh.chains.counts.tolist() == [-1, -1]  # nothing was searched for
    batch.write(slots, fresh)
    part = batch.select(slots)
    draft = drafter.propose(part, roots)
    for name in ("tokens", "parents", "depths", "ancestors", "valid", "scores"):
        assert getattr(draft, name).equal(getattr(alone, name)), name
    batch.write(slots, part)
    again = batch.select(slots)
    assert rows.chains.counts.gt(0).all()
    assert again.chains.tokens.equal(rows.chains.tokens)
    assert again.chains.counts.equal(rows.chains.counts)
    assert again.chains.runs.equal(rows.chains.runs)
    assert again.context.lengths.equal(rows.context.lengths)
    for row, length in enumerate(rows.context.lengths.tolist()):
        assert again.context.tokens[row, :length].equal(rows.context.tokens[row, :length])
    others = batch.select(torch.tensor([0, 2, 4]))
    assert (others.context.tokens == NO_TOKEN).all()
    assert not others.context.lengths.any()
    assert others.chains.counts.tolist() == [-1] * 3
