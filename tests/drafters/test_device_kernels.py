"""The Triton kernels against the host's, in Triton's interpreter: drafts, rows, counts, weights.

``make test-device-kernels`` installs Triton and sets TRITON_INTERPRET=1.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from token_recycling import AdjacencyMatrix
from token_recycling.accept import accept_choices, step_summary
from token_recycling.drafters import AdaptiveDrafter
from token_recycling.matrix import STATE
from token_recycling.tokens import NO_TOKEN

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import token_recycling.graph.kernels  # noqa: F401  registers operations
from token_recycling.drafters.on_device import DeviceDrafting

V = 23
CPU = torch.device("cpu")
slow = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


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
        self.rows = self.host.new_rows(batch, capacity)
        self.host.load(self.rows, self.texts)
        self.device = DeviceDrafting(self.host, batch, capacity, nodes, CPU)

    def tokens(self, count):
        return self.rng.integers(0, 4, count).tolist()

    def step(self, ended=()):
        """Propose and observe with both; compare everything.

        Returns:
            False if two nodes of all but equal scores have changed places in a tree.
        """
        self.device.begin(self.texts)
        self.host.load(self.rows, self.texts)
        roots = torch.tensor(self.tokens(self.batch))
        draft = self.host.propose(self.rows, roots, self.nodes)
        found = self.device.propose(roots.clone())
        same = [self.compare_tree(draft, found, row) for row in range(self.batch)]
        for mine, its in [
            (self.rows.chains.counts, self.device._counts),
            (self.rows.chains.runs, self.device._runs),
            (self.rows.context.tokens, self.device._context),
            (self.rows.context.lengths, self.device._lengths),
        ]:
            assert mine.equal(its) or mine is self.rows.chains.runs and self.nodes == 1
        if not all(same):
            return False
        active = torch.tensor([row not in ended for row in range(self.batch)])
        draft = draft.only(active)
        logits = torch.from_numpy(self.rng.normal(size=(self.batch, draft.nodes, V))).float() * 2
        logits[torch.from_numpy(self.rng.random((self.batch, draft.nodes)) < 0.1)] = torch.nan
        choices = torch.from_numpy(self.rng.integers(0, 4, (self.batch, draft.nodes)))
        accepted = accept_choices(draft, choices)
        self.compare_accepted(draft, choices, accepted, roots)
        self.host.observe(self.rows, draft, logits, accepted)
        before = {name: tensor.clone() for name, tensor in self.device._learnt.items()}
        self.device.observe(draft, logits, accepted)
        self.compare_learnt(before)
        assert self.rows.context.tokens.equal(self.device._context)
        assert self.rows.context.lengths.equal(self.device._lengths)
        for row, (_, *emitted) in enumerate(step_summary(draft, accepted).tolist()):
            emitted = [token for token in emitted if token != NO_TOKEN]
            if emitted:
                self.texts[row] = [*self.texts[row], int(roots[row]), *emitted[:-1]]
        return True

    def compare_tree(self, draft, found, row):
        for node in range(self.nodes):
            mine = 1.0 if draft.scores is None else float(draft.scores[row, node])
            its = float(found.scores[row, node])
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
        next_roots = roots.clone()
        path, emitted, counts, summary = torch.ops.token_recycling.device_accept(
            draft.tokens,
            draft.parents,
            draft.depths,
            draft.valid,
            choices,
            next_roots,
            draft.max_depth + 1,
        )
        assert counts.equal(accepted.counts)
        assert emitted.equal(accepted.emitted)
        for row, count in enumerate(counts.tolist()):
            assert path[row, :count].equal(accepted.path[row, :count])
            root = emitted[row, count - 1] if count else roots[row]
            assert next_roots[row] == root
        assert summary.equal(step_summary(draft, accepted))

    def compare_learnt(self, before):
        matrix, learnt = self.host.matrix, self.device._learnt
        assert matrix.keys.equal(learnt["keys"])
        assert matrix.evidence.equal(learnt["evidence"])
        assert torch.allclose(matrix.weights, learnt["weights"], rtol=1e-4, atol=1e-5)
        logits = torch.from_numpy(self.host.logits).float()
        assert torch.allclose(logits, self.device._logits, rtol=1e-4, atol=1e-4)
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
    learning_rate=st.sampled_from([0.0, 0.02, -1.0]),
    chain=st.sampled_from([0, 1, 4, 16]),
)
def test_the_device_agrees_with_the_host(seed, nodes, **options):
    both = Both(seed, nodes=nodes, **options)
    same = [both.step(ended=[1] if step == 2 and both.batch > 1 else ()) for step in range(3)]
    assert any(same)
