"""Requests that are decoded together by captured steps, and join and leave between these."""

import pytest

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence, at_most
from token_recycling.model.kv_cache import FixedCache
from token_recycling.server.batch import ContinuousBatch, Row

PROMPTS = random_prompts([20, 7, 33, 12, 5])
LENGTHS = (40, 25, 30, 12, 20)
JOINS = {0: [0], 3: [1], 5: [2, 3], 9: [4]}  # by step


@pytest.fixture(scope="module")
def llama():
    return make("llama")


def served(model):
    """The answers, and the rows of the steps that were captured."""
    recycler = TokenRecycling(model, nodes=7, graph=True, strict=True)
    graph = recycler.session.graph_decoder()
    batch = ContinuousBatch(recycler.target, recycler.draft_size, graph)
    rows = [
        Row(Sequence(prompt, [at_most(length)]), GreedyAcceptor(), recycler.drafter)
        for prompt, length in zip(PROMPTS, LENGTHS)
    ]
    captured, number = set(), 0
    while number == 0 or batch.rows:
        for joining in JOINS.get(number, ()):
            batch.join(rows[joining])
        batch.step()
        captured |= {spec.batch for spec in graph.pool._steps}
        for row in list(batch.rows):
            if not row.sequence.active:
                batch.leave(row)
        number += 1
    return [row.sequence.new_tokens for row in rows], captured


def test_rows_join_and_leave(llama):
    found, captured = served(llama)
    assert found == [plain(llama, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS)]
    assert {2, 4} < captured
    assert captured <= {1, 2, 4, 8}  # padded to powers of two


@pytest.mark.parametrize("what", ["load", "store"])
def test_what_is_not_copied_turns_this_red(llama, monkeypatch, what):
    """Keys and values of all rows but the first."""
    copy = getattr(FixedCache, what)

    def forgets(self, cache, *lengths):
        entries = self.entries if what == "load" else [
            each for layer in cache.layers for each in (layer.keys, layer.values)
        ]  # fmt: skip
        copy(self, cache, *lengths)
        for each in entries:
            each[1:] = 0

    monkeypatch.setattr(FixedCache, what, forgets)
    assert served(llama)[0] != [plain(llama, p, length) for p, length in zip(PROMPTS, LENGTHS)]
