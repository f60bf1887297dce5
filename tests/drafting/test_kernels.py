"""The compiled adaptive drafter against the plain one: drafts, rows, counts and weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_drafter import DEPTHS, LEVELS, RUNS, PlainDrafter, half, match
from token_recycling import AdjacencyMatrix
from token_recycling.decoding.walks import path_along
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.host import context, entries, learn, rates, state, tree
from token_recycling.util.tokens import NO_TOKEN

V = 11
KINDS_OF_ROWS = (*LEVELS, "runners-up", "rejected")
SOURCES = (*LEVELS, "chain", "root")
LENGTHS, DEPTH_CLASSES = list(RUNS), list(DEPTHS)


def index_of(feature, k):
    """The index of a feature of the plain drafter in the compiled one's counts."""
    lacking, chain, beside, _ = rates.feature_offsets(k)
    kind = feature[0]
    if kind == "rank":
        return (KINDS_OF_ROWS.index(feature[1]) * k + feature[2]) * rates.BINS + feature[3]
    if kind == "absent":
        return lacking + KINDS_OF_ROWS.index(feature[1]) * rates.BINS + feature[2]
    if kind == "beside":
        return beside + LENGTHS.index(feature[1])
    length, depth = LENGTHS.index(feature[1]), DEPTH_CLASSES.index(feature[2])
    return chain + length * len(DEPTHS) + depth


class Both:
    """One text in the compiled drafter and in the plain one, which must agree at every step."""

    def __init__(self, seed, k, nodes, pairs, triples, old_weight, chain, learning_rate):
        self.rng = np.random.default_rng(seed)
        self.k, self.nodes = k, nodes
        self.matrix = AdjacencyMatrix(V, k)
        self.drafter = AdaptiveDrafter(
            self.matrix,
            nodes,
            pairs=pairs,
            triples=triples,
            old_weight=old_weight,
            chain=chain,
            learning_rate=learning_rate,
        )
        slots = {"pair": pairs, "triple": triples}
        depth = self.drafter.max_depth
        self.plain = PlainDrafter(V, k, slots, old_weight, learning_rate, chain, depth)
        self.text = self.rng.integers(0, 3, 5).tolist()
        self.rows = self.drafter.new_state(1)
        self.drafter.load(self.rows, [self.text])

    def step(self, root, emitted, drafts=True):
        """Draft below ``root``, compare, and learn random rows; ``emitted`` follows the root.

        Returns:
            The next root; None if rounding has exchanged two nodes of the draft.
        """
        self.text.append(root)
        nodes = None if drafts else 1
        draft = self.drafter.propose(self.rows, torch.tensor([root]), nodes)
        tree = None
        if drafts:  # one node more: the last one may be tied with it
            longer = self.plain.propose(self.text, self.nodes + 2)
            tree = longer[: self.nodes + 1]
            if not self.compare(draft, tree, [score for _, _, score in longer]):
                return None
        logits = torch.from_numpy(self.rng.normal(size=(1, draft.size, V))).float() * 2
        logits[0, self.rng.random(draft.size) < 0.1] = torch.nan  # is not learnt
        candidates = ids, p, finite = best_candidates(logits, self.k)
        rows = {
            node: dict(zip(ids[0, node].tolist(), p[0, node].astype(float).tolist()))
            for node in range(draft.size)
            if finite[0, node] and draft.valid[0, node]
        }
        found = torch.tensor([[*emitted, NO_TOKEN]])
        accepted = Accepted(path_along(draft, found), found, torch.tensor([len(emitted)]))
        self.drafter.observe(self.rows, draft, candidates, accepted)
        self.plain.observe(self.text, tree, rows, emitted)
        self.text += emitted[:-1]
        assert self.rows.context.tokens[0, : len(self.text)].tolist() == self.text
        return emitted[-1]

    def compare(self, draft, tree, scores):
        """Return False if two nodes of equal scores have changed places."""
        assert int(draft.valid.sum()) == len(tree)
        assert bool(draft.valid[0, : len(tree)].all())
        for node, (token, parent, score) in enumerate(tree):
            assert float(draft.scores[0, node]) == pytest.approx(score, rel=1e-5)
            if (draft.tokens[0, node], draft.parents[0, node]) != (token, parent):
                near = [other == pytest.approx(score, rel=1e-12) for other in scores]
                assert sum(near) > 1  # itself and another one
                return False
            depth = 0 if node == 0 else int(draft.depths[0, parent]) + 1
            assert int(draft.depths[0, node]) == depth
            above = draft.ancestors[0, parent].clone() if node else torch.zeros(draft.size).bool()
            above[node] = True
            assert draft.ancestors[0, node].equal(above)
        for node in range(len(tree), draft.size):  # padding: below the root
            assert draft.ancestors[0, node].nonzero()[:, 0].tolist() == [0, node]
            assert draft.tokens[0, node] == draft.parents[0, node] == draft.depths[0, node] == 0
        return True

    def compare_all_learnt(self):
        matrix, k = self.matrix, self.k
        starts = {"token": 0, "pair": V, "triple": V + matrix.pairs}
        learnt = np.zeros(len(matrix.all_candidates), bool)
        for (level, slot), (key, row) in self.plain.rows.items():
            at = starts[level] + slot
            learnt[at] = True
            assert level == "token" or int(matrix.keys[at - V]) == key
            count = len(row)
            assert matrix.all_candidates[at, :count].tolist() == list(row)
            assert matrix.all_candidates[at, count:].eq(NO_TOKEN).all()
            assert matrix.all_probabilities[at, :count].tolist() == list(row.values())
        assert matrix.all_candidates[~learnt].eq(NO_TOKEN).all()
        features = rates.feature_offsets(k).nothing + 1
        trials, hits = np.zeros(features), np.zeros(features)
        for feature, count in self.plain.trials.items():
            trials[index_of(feature, k)] += count
            hits[index_of(feature, k)] += self.plain.hits[feature]
        assert np.array_equal(matrix.evidence.numpy(), np.stack([hits, trials]))
        for levels, chain in [(("token",), 0), (LEVELS, 2), (("token", "triple"), 1)]:
            which = sum(LEVELS.index(level) for level in levels) * 3 + chain
            for i, source in enumerate((*SOURCES, "constant")):
                expected = self.plain.weight((levels, chain), source)
                assert float(matrix.weights[which, i]) == pytest.approx(expected, abs=1e-9)
        for number in range(state.PATTERNS):
            pattern = frozenset(s for i, s in enumerate(SOURCES) if number >> i & 1)
            for i, source in enumerate((*SOURCES, "constant")):
                expected = self.plain.weights.get((pattern, source), 0.0)
                found = float(matrix.weights[state.SETS + number, i])
                assert found == pytest.approx(expected, abs=1e-9)


def run(both, steps):
    rng = np.random.default_rng(len(both.text) + steps)
    root = 1
    for step in range(steps):
        emitted = rng.integers(0, 4, rng.integers(1, 4)).tolist()
        root = both.step(root, emitted, drafts=step % 5 != 3)
        if root is None:
            return
    both.compare_all_learnt()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 8),
    nodes=st.sampled_from([1, 2, 7, 24, 60]),
    pairs=st.sampled_from([0, 5, 101]),
    triples=st.sampled_from([0, 7, 211]),
    old_weight=st.sampled_from([0.0, 0.4]),
    chain=st.sampled_from([0, 2, 16]),
    learning_rate=st.sampled_from([0.0, 0.02]),
)
def test_drafts_rows_counts_and_weights_are_those_of_the_plain_drafter(**options):
    run(Both(**options), 12)


CASE = {
    "seed": 5,
    "k": 4,
    "nodes": 24,
    "pairs": 101,
    "triples": 211,
    "old_weight": 0.4,
    "chain": 16,
    "learning_rate": 0.02,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("WINDOW", 1), ("PRIOR", 5.0), ("FLOOR", 0.05), ("RUNS", {**RUNS, 1: (0.9, 0.9, 0.032)})],
)
def test_another_constant_is_noticed(monkeypatch, name, value):
    """Negative control: the plain drafter with one constant changed."""
    import plain_drafter

    monkeypatch.setattr(plain_drafter, name, value)
    with pytest.raises((AssertionError, ValueError)):
        run(Both(**CASE), 30)


@pytest.mark.parametrize("method", ["learn_row", "count", "remember"])
def test_a_step_that_is_not_learnt_is_noticed(monkeypatch, method):
    monkeypatch.setattr(PlainDrafter, method, lambda *args: None)
    with pytest.raises(AssertionError):
        run(Both(**CASE), 30)


@given(st.floats(0, 1, width=32))
def test_halves(p):
    bits = entries.to_half(p)
    assert rates.HALVES[bits] == half(p)
    assert abs(rates.HALVES[bits] - p) <= abs(float(np.float16(p)) - p)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 16),
    st.integers(0, 16),
)
def test_the_longest_and_latest_match(text, window, length):
    chain = np.zeros(length, np.int64)
    run_, count = context.match(np.array(text), len(text), window, chain)
    expected, longest = match(text, length)
    assert run_ == min(longest, window)
    if longest <= window:
        assert chain[:count].tolist() == expected


def test_rows_of_different_lengths_are_drafted_as_if_alone():
    both = Both(**CASE)
    run(both, 30)
    texts, roots = [[1, 2, 0, 1, 2], [5], [3, 3, 3]], [0, 6, 3]

    def proposed(texts, roots):
        rows = both.drafter.new_state(len(texts))
        both.drafter.load(rows, texts)
        return both.drafter.propose(rows, torch.tensor(roots))

    whole = proposed(texts, roots)
    for row in range(3):
        alone = proposed(texts[row : row + 1], roots[row : row + 1])
        for name in ("tokens", "parents", "depths", "ancestors", "valid", "scores"):
            assert getattr(alone, name)[0].equal(getattr(whole, name)[row]), name
    assert isinstance(whole, DraftTree)


A, THE, DOG, CAT, ONE = range(5)


@pytest.mark.parametrize(
    ("drafted", "rejected", "expected"),
    [
        ([THE], True, {DOG: 0.9 * 0.9, ONE: 0.1 * 0.5 / 0.5, CAT: 0.9 * 0.1}),
        ([], False, {ONE: 1.0}),
        ([A, THE], True, None),  # the root is A, whose own child row is what follows it
    ],
)
def test_a_root_row_is_what_follows_rejected_nodes(drafted, rejected, expected):
    """After the token "a" was chosen where "the" was drafted: the example of ``host.remember``."""
    behind = {THE: ([DOG, CAT], [0.9, 0.1]), A: ([CAT, DOG], [0.8, 0.2])}
    rows = [([A, ONE], [0.5, 0.5]), *(behind[token] for token in drafted)]
    ids, p = np.array([row[0] for row in rows], np.int32), np.array([row[1] for row in rows])
    path, emitted = np.array([0, 0]), np.array([A, NO_TOKEN])
    if expected is None:
        path[1], emitted[1] = 1, CAT
    k = 4  # of the row that is made, which may be longer than those here
    candidates, probabilities = np.empty(k - 1, np.int32), np.empty(k - 1, np.uint16)
    found = learn.remember(
        np.zeros(len(rows), np.int64),
        np.ones(len(rows), np.bool_),
        ids,
        p.astype(np.float32),
        np.ones(len(rows), np.bool_),
        path,
        emitted,
        candidates,
        probabilities,
        False,
    )
    if expected is None:  # "a" was drafted and has no children: its runners-up alone
        rejected, expected = False, {DOG: 1.0}
    assert found == rejected
    shown = dict(zip(candidates.tolist(), rates.HALVES[probabilities].tolist()))
    shown.pop(NO_TOKEN, None)
    assert list(shown) == list(expected)
    assert list(shown.values()) == pytest.approx(list(expected.values()), abs=1e-3)


def test_rows_with_a_candidate_twice_change_no_other_memory():
    """A damaged matrix: the weight sets are found by bits, which must not add up."""
    both = Both(**CASE)
    matrix = both.matrix
    matrix.all_candidates.fill_(1)
    matrix.keys.copy_(torch.arange(len(matrix.keys)))
    tables = both.drafter._tables()
    gathered = tree.new_gathered(matrix.k)
    both.rows.root_rows.candidates.fill_(1)
    roots = both.rows.arrays().roots
    count, _, _ = tree.gather(0, 0, 1, 1, 3, 0, 0, roots, tables, gathered)
    assert 0 < count <= len(gathered.candidates)
    assert gathered.features[:count, -1].min() >= 0
    assert gathered.features[:count, -1].max() < state.PATTERNS
