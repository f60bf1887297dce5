"""The Triton kernels against the host's and the oracle: drafts, rows, counts, weights.

They run on a GPU, or in Triton's interpreter: ``make test-device-kernels`` installs Triton and
sets TRITON_INTERPRET=1.
"""

import math
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_kernels import Both as WithOracle
from test_kernels import run

from token_recycling import AdjacencyMatrix
from token_recycling.decoding.accept import accept_choices, step_summary
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.util.tokens import NO_TOKEN

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from token_recycling.drafting.device import DeviceMatrix
from token_recycling.drafting.kernels.device import context, count, learn, propose, sources
from token_recycling.drafting.kernels.device.top_k import device_top_k
from token_recycling.drafting.kernels.host.tree import FLOOR
from token_recycling.graph import kernels
from token_recycling.graph.device_drafting import DeviceDrafting

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
V = 23


@pytest.fixture
def few_lanes(monkeypatch):
    """As few lanes as nodes, which the interpreter computes in less time than 64 (see below)."""
    for module in (propose, learn):
        monkeypatch.setattr(module, "LEAST_NODES", 2)


LEAST_SCORE = math.exp(FLOOR)
# To make an example smaller takes minutes in the interpreter.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
slow = settings(max_examples=12, phases=PHASES, suppress_health_check=list(HealthCheck))


def on_device(drafter, *shape):
    """Rows and the matrix of a drafter on the device."""
    return DeviceDrafting(drafter, *shape, DeviceMatrix(drafter, DEVICE))


def on_host(draft):
    """A draft of the device with its scores, which ``DraftTree.to`` leaves behind."""
    parts = {name: part for name, part in vars(draft).items() if isinstance(part, torch.Tensor)}
    return replace(draft, **{name: part.cpu() for name, part in parts.items()})


class Both:
    """Some texts in the host's drafter and, copied before every step, in the device's."""

    def __init__(self, seed, k=5, nodes=12, batch=1, pairs=13, triples=29, capacity=200, **options):
        self.rng = np.random.default_rng(seed)
        self.batch = batch
        self.host = AdaptiveDrafter(
            AdjacencyMatrix(V, k), max(nodes - 1, 1), pairs=pairs, triples=triples, **options
        )
        self.nodes, self.capacity = nodes, capacity
        self.texts = [self.tokens(self.rng.integers(1, 9)) for _ in range(batch)]
        self.rows = self.host.new_state(batch, capacity)
        self.host.load(self.rows, self.texts)
        self.device = on_device(self.host, batch, capacity, nodes)

    def tokens(self, count):
        return self.rng.integers(0, 4, count).tolist()

    def step(self, ended=()):
        """Propose and observe with both; compare everything.

        Returns:
            False if two nodes of all but equal scores have changed places in a tree, or one is
            at the floor.
        """
        root_rows = self.rows.root_rows.select(torch.arange(self.batch))
        self.device.begin(self.texts, torch.zeros(self.batch))
        self.host.load(self.rows, self.texts)
        self.rows.root_rows = root_rows  # as in a text that goes on
        self.device.set_root_rows(root_rows)
        roots = torch.tensor(self.tokens(self.batch))
        draft = self.host.propose(self.rows, roots, self.nodes)
        found = on_host(self.device.propose(roots.to(DEVICE, copy=True)))
        same = [self.compare_tree(draft, found, row) for row in range(self.batch)]
        for mine, its in [
            (self.rows.chains.counts, self.device.states.state.chain_lengths),
            (self.rows.chains.runs, self.device.states.state.match_lengths),
            (self.rows.context.tokens, self.device.states.state.context),
            (self.rows.context.lengths, self.device.states.state.lengths),
        ]:
            assert mine.equal(its.cpu()) or (mine is self.rows.chains.runs and self.nodes == 1)
        if not all(same):
            return False
        active = torch.tensor([row not in ended for row in range(self.batch)])
        draft = draft.only(active)
        logits = torch.from_numpy(self.rng.normal(size=(self.batch, draft.size, V))).float() * 2
        logits[torch.from_numpy(self.rng.random((self.batch, draft.size)) < 0.1)] = torch.nan
        choices = torch.from_numpy(self.rng.integers(0, 4, (self.batch, draft.size)))
        accepted = accept_choices(draft, choices)
        self.compare_accepted(draft, choices, accepted, roots)
        self.host.observe(self.rows, draft, best_candidates(logits, self.host.k), accepted)
        parts = (accepted.path, accepted.emitted, accepted.counts)
        moved = Accepted(*(part.to(DEVICE) for part in parts))
        self.device.observe(draft.to(DEVICE), logits.to(DEVICE), moved)
        self.compare_learnt()
        assert self.rows.context.tokens.equal(self.device.states.state.context.cpu())
        assert self.rows.context.lengths.equal(self.device.states.state.lengths.cpu())
        self.compare_root_rows()
        for row, (_, *emitted) in enumerate(step_summary(draft, accepted).tolist()):
            emitted = [token for token in emitted if token != NO_TOKEN]
            if emitted:
                self.texts[row] = [*self.texts[row], int(roots[row]), *emitted[:-1]]
        return True

    def compare_tree(self, draft, found, row):
        for node in range(self.nodes):
            mine = 1.0 if draft.scores is None else float(draft.scores[row, node])
            its = float(found.scores[row, node])
            if 0.0 in (mine, its) and max(mine, its) == pytest.approx(LEAST_SCORE, rel=1e-4):
                return False  # float32 cannot tell whether this node is below the floor
            assert its == pytest.approx(mine, rel=1e-4, abs=1e-7)
            if (draft.tokens[row, node], draft.parents[row, node]) != (
                found.tokens[row, node],
                found.parents[row, node],
            ):
                near = draft.scores[row].clone()
                near[node] = 2.0
                assert float((near - mine).abs().min()) < 1e-5
                return False
            assert draft.depths[row, node] == found.depths[row, node]
            assert draft.valid[row, node] == found.valid[row, node]
            assert draft.ancestors[row, node].equal(found.ancestors[row, node])
        return True

    def compare_accepted(self, draft, choices, accepted, roots):
        next_roots = roots.to(DEVICE, copy=True)
        on_device = draft.to(DEVICE)
        found, summary = kernels.accept(on_device, choices.to(DEVICE), next_roots)
        path, emitted, counts = found.path.cpu(), found.emitted.cpu(), found.counts.cpu()
        assert counts.equal(accepted.counts)
        assert emitted.equal(accepted.emitted)
        for row, length in enumerate(counts.tolist()):
            assert path[row, :length].equal(accepted.path[row, :length])
            root = emitted[row, length - 1] if length else roots[row]
            assert next_roots[row] == root
        assert summary.cpu().equal(step_summary(draft, accepted))

    def compare_root_rows(self):
        mine, k = self.rows.root_rows, self.host.k
        assert mine.rejected.equal(self.device.states.state.roots.rejected.cpu())
        p, its = (
            mine.probabilities,
            self.device.states.state.roots.probabilities.view(torch.float16).cpu(),
        )
        assert torch.allclose(p.float(), its.float(), rtol=2e-3, atol=1e-6)
        different = mine.candidates != self.device.states.state.roots.candidates.cpu()
        for row, rank in different.nonzero().tolist():
            others = p[row].float()
            others[rank] = 2.0
            near = float((others - float(p[row, rank])).abs().min())
            assert rank == k - 2 or near < 2e-3 * float(p[row, rank])

    def compare_learnt(self):
        matrix = self.host.matrix
        learnt = {name: tensor.cpu() for name, tensor in self.device._matrix._learnt.items()}
        assert matrix.keys.equal(learnt["keys"])
        assert matrix.evidence.equal(learnt["evidence"])
        assert torch.allclose(matrix.weights, learnt["weights"], rtol=1e-4, atol=1e-5)
        assert self.device._matrix.tables.rounded.cpu().equal(learnt["weights"].float())
        logits = torch.from_numpy(self.host.logits).float()
        assert torch.allclose(logits, self.device._matrix.tables.logits.cpu(), rtol=1e-4, atol=1e-4)
        p, its = matrix.all_probabilities.float(), learnt["all_probabilities"].float()
        assert torch.allclose(p, its, rtol=2e-3, atol=1e-6)
        different = matrix.all_candidates != learnt["all_candidates"]
        # Candidates of all but equal probabilities may have changed places.
        for row, rank in different.nonzero().tolist():
            others = p[row].clone()
            others[rank] = 2.0
            last = rank == matrix.k - 1
            assert last or float((others - p[row, rank]).abs().min()) < 2e-3 * float(p[row, rank])


@slow
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 16),
    nodes=st.sampled_from([1, 2, 7, 24]),
    batch=st.sampled_from([1, 2, 5]),
    pairs=st.sampled_from([0, 5, 101]),
    triples=st.sampled_from([0, 7, 211]),
    old_weight=st.sampled_from([0.0, 0.4]),
    learning_rate=st.sampled_from([0.0, 0.02]),
    chain=st.sampled_from([0, 1, 4, 16]),
    capacity=st.sampled_from([11, 200]),  # the shorter one becomes full
)
def test_the_device_agrees_with_the_host(few_lanes, seed, nodes, **options):
    both = Both(seed, nodes=nodes, **options)
    same = [both.step(ended=[1] if step == 2 and both.batch > 1 else ()) for step in range(3)]
    assert any(same)


@pytest.mark.parametrize(("batch", "nodes"), [(64, 4), (1, 64), (16, 33)])
def test_many_rows_and_large_trees(batch, nodes):
    both = Both(3, nodes=nodes, batch=batch, k=12, chain=16)
    assert both.step()
    both.step(ended=range(0, batch, 3))


@slow
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 16),
    nodes=st.sampled_from([1, 9, 30]),
    pairs=st.sampled_from([0, 101]),
    triples=st.sampled_from([0, 211]),
    chain=st.sampled_from([0, 8]),
)
def test_the_device_drafts_what_the_oracle_drafts(seed, k, nodes, pairs, triples, chain):
    """Node by node; the matrix has learnt a text, so that rows are empty, partly full and full."""
    both = WithOracle(seed, min(k, 11), nodes, pairs, triples, 0.4, chain, 0.02)
    run(both, 12)
    drafting = on_device(both.drafter, 1, 200, nodes + 1)
    drafting.begin([both.text], torch.tensor([1]))
    drafting.set_root_rows(both.rows.root_rows)
    both.text.append(1)
    # One node more: the last one of the draft may be tied with it.
    longer = both.plain.propose(both.text, nodes + 2)
    tree = longer[: nodes + 1]
    draft = on_host(drafting.propose(torch.tensor([1], device=DEVICE)))
    assert int(draft.valid.sum()) == len(tree)
    scores = [score for _, _, score in longer]
    for node, (token, parent, score) in enumerate(tree):
        assert float(draft.scores[0, node]) == pytest.approx(score, rel=1e-4, abs=1e-7)
        if (int(draft.tokens[0, node]), int(draft.parents[0, node])) != (token, parent):
            # float32 cannot tell these scores apart, so that two nodes have changed places.
            others = [abs(other - score) for i, other in enumerate(scores) if i != node]
            assert min(others) < 1e-5
            break


@pytest.mark.parametrize("k", [2, 8])
def test_nodes_of_equal_scores(k):
    """All rows have the same probabilities, so that many nodes of a depth are tied.

    Up to rounding, which depends on the order of the factors: such nodes may change places.
    """
    matrix = AdjacencyMatrix(V, k)
    tokens = torch.arange(V)
    candidates = (tokens[:, None] * 5 + torch.arange(k)[None, :] * 3 + 1) % V
    matrix.update(tokens, candidates, torch.full((V, k), 1 / k))
    host = AdjacencyMatrix.clone(matrix)
    drafter = AdaptiveDrafter(host, 40)
    rows = drafter.new_state(2, 50)
    texts = [[1, 2, 3], [4]]
    drafter.load(rows, texts)
    drafting = on_device(AdaptiveDrafter(matrix, 40), 2, 50, 41)
    roots = torch.tensor([7, 9])
    drafting.begin(texts, roots)
    expected = drafter.propose(rows, roots, 41)
    found = on_host(drafting.propose(roots.to(DEVICE)))
    assert expected.valid.all()
    assert found.scores == pytest.approx(expected.scores, rel=1e-5)
    for row in range(2):
        last = float(expected.scores[row, -1]) * (1 + 1e-5)  # of these, any may be left out
        tied = [Counter(), Counter()]
        for nodes, draft in zip(tied, (found, expected)):
            for node in range(41):
                if (score := float(draft.scores[row, node])) > last:
                    parent = int(draft.tokens[row, draft.parents[row, node]])
                    nodes[f"{score:.4g}", int(draft.tokens[row, node]), parent] += 1
        assert tied[0] == tied[1]
        assert len({score for score, _, _ in tied[0]}) < sum(tied[0].values())


def taught(k, nodes):
    """A drafter for text of 23 tokens, of which each has a few likely successors, and a text."""
    rng = np.random.default_rng(1)
    text = [1]
    for _ in range(300):
        text.append(int((text[-1] * 5 + rng.geometric(0.4)) % V))
    drafter = AdaptiveDrafter(AdjacencyMatrix(V, k), nodes - 1)
    tokens = torch.arange(V)
    candidates = (tokens[:, None] * 5 + torch.arange(1, k + 1)[None, :]) % V
    shares = torch.from_numpy(rng.dirichlet(np.full(k, 0.5), V)).float().sort(descending=True)
    drafter.matrix.update(tokens, candidates, shares.values)
    return drafter, text


@pytest.mark.skipif(DEVICE.type != "cpu", reason="loads are counted in the interpreter")
@pytest.mark.parametrize("nodes", [2, 3, 16, 64])
def test_larger_rounds_change_no_draft_and_read_memory_less_often(monkeypatch, nodes):
    """Each round waits for its loads, so that their number is that of rounds."""
    builder = triton.runtime.interpreter.interpreter_builder
    load, loads = builder.create_masked_load, Counter()
    drafter, text = taught(8, nodes)
    drafts = {}
    for size in (2, 4, 8, 16):
        monkeypatch.setattr(propose, "nodes_per_round", lambda *_, size=size: size)

        def counted(*args, size=size):
            loads[size] += 1
            return load(*args)

        monkeypatch.setattr(builder, "create_masked_load", counted)
        drafting = on_device(drafter, 1, 400, nodes)
        drafting.begin([text], torch.tensor([7]))
        drafts[size] = on_host(drafting.propose(torch.tensor([7], device=DEVICE)))
    first = drafts.pop(2)
    assert first.valid.all()
    for draft in drafts.values():
        for name in ("tokens", "parents", "depths", "ancestors", "scores"):
            assert getattr(draft, name).equal(getattr(first, name))
    if nodes == 64:  # 63 nodes are expanded, in 32 rounds of 2 and in 9 of 8
        assert loads[8] < loads[2] / 3


@pytest.mark.parametrize("what", ["WINDOW", "FLOOR", "PRIOR", "LEAST", "PLACES"])
def test_another_constant_turns_this_red(monkeypatch, what):
    """The host's constants are compiled in; so the device's are changed."""
    other = {"WINDOW": 1, "FLOOR": 0.2, "PRIOR": 9.0, "LEAST": 0.5, "PLACES": 64}[what]
    where = {"WINDOW": context, "PRIOR": count, "LEAST": sources}.get(what, propose)
    monkeypatch.setattr(where, what, tl.constexpr(other))
    both = Both(5, nodes=24, chain=16)

    def steps():
        for _ in range(6):
            assert both.step()

    # A compiled kernel notices that its constants have changed.
    with pytest.raises((AssertionError, RuntimeError, InterpreterError)):
        steps()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 16),
    vocab=st.sampled_from([16, 100, 128, 129, 1000, 2300]),
    kind=st.sampled_from(["any", "ties", "masked", "nan"]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_top_k_by_blocks_is_exact(seed, k, vocab, kind, dtype):
    """Values of PyTorch's topk; of equal ones the first tokens, as on the host."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, vocab, generator=rng).to(dtype)
    if kind == "ties":
        logits = (logits * 2).round()
    elif kind == "masked":  # all but a few tokens are forbidden
        logits.masked_fill_(torch.rand(2, 3, vocab, generator=rng) > 3 / vocab, -torch.inf)
    elif kind == "nan":
        logits[0, 1, vocab // 2] = torch.nan
    values, ids = device_top_k(logits, k)
    if kind == "nan":
        assert torch.isinf(values[0, 1, 0])
        assert int(ids[0, 1, 0]) == vocab // 2
        values[0, 1], ids[0, 1], logits[0, 1] = 0, 0, 0
        values[0, 1], ids[0, 1] = 0, torch.arange(k)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert values.equal(expected.values[..., :k])
    assert ids.equal(expected.indices[..., :k])
