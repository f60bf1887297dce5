"""The default drafter: best-first trees from mixed sources, which learn how reliable they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import Views, as_array, in_threads
from token_recycling import defaults
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import Drafter, DrafterState
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.kernels.host.entries import find
from token_recycling.drafting.kernels.host.learn import LEARNING_RATE, observe
from token_recycling.drafting.kernels.host.rates import (
    expected_rates,
    initial_weights,
    refresh_logits,
)
from token_recycling.drafting.kernels.host.state import (
    INPUTS,
    PATTERNS,
    SETS,
    Drafts,
    RootArrays,
    State,
    Tables,
    Verified,
)
from token_recycling.drafting.kernels.host.tree import propose
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.ngram import Chains, Context
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.tokens import NO_TOKEN

# Slots for pairs and triples of tokens, prime numbers: 12.5 MiB with k = 12
PAIRS, TRIPLES = 32749, 131071
OLD_WEIGHT = 0.4  # weight of the old row in an average
CHAIN = 16  # longest chain
DEEPER = 6  # levels that a tree may have below the chain's end
THREAD_NODES = 128  # nodes of all rows from which a thread of its own is faster
ROW_NAMES = ("token", "pair", "triple")  # by level


@dataclass
class RootCandidates(DrafterState):
    """What the last step says of what may follow the next root (``host.learn.remember``).

    Attributes:
        candidates: int32 [B, k - 1], best first; ``NO_TOKEN`` where there is none.
        probabilities: float16 [B, k - 1].
        rejected: bool [B], True if it comes from the distributions behind rejected nodes.
    """

    candidates: Tensor
    probabilities: Tensor
    rejected: Tensor

    @classmethod
    def none(cls, batch: int, k: int) -> RootCandidates:
        """Return rows without candidates."""
        candidates = torch.full((batch, k - 1), NO_TOKEN, dtype=torch.int32, device="cpu")
        probabilities = torch.zeros((batch, k - 1), dtype=torch.float16, device="cpu")
        return cls(candidates, probabilities, torch.zeros(batch, dtype=torch.bool, device="cpu"))

    def clear(self) -> None:
        """Forget all candidates."""
        self.candidates.fill_(NO_TOKEN)
        self.probabilities.zero_()
        self.rejected.zero_()


@dataclass
class AdaptiveState(DrafterState):
    """The adaptive drafter's state of each row.

    Attributes:
        context: the tokens so far, including the root of the last draft.
        chains: the chains of the last draft.
        root_rows: one more row of candidates for the next root.
    """

    context: Context
    chains: Chains
    root_rows: RootCandidates

    def __post_init__(self) -> None:
        self._views = Views()

    def arrays(self) -> State:
        """Return views for the kernels."""
        context, chains, roots = self.context, self.chains, self.root_rows
        arrays = self._views.of(
            context.tokens,
            context.lengths,
            chains.tokens,
            chains.counts,
            chains.runs,
            roots.candidates,
            roots.probabilities,
            roots.rejected,
        )
        return State._make((*arrays[:5], RootArrays._make(arrays[5:])))


def expected_acceptance(nodes: int) -> tuple[float, ...]:
    """Return the probability that each node of a tree is right, on average.

    Fitted by lab/fit.py to the MAT of 1 to 31 nodes on 59 answers of SmolLM2-135M-Instruct, each
    with an empty matrix.

    Args:
        nodes: below the root.
    """
    return tuple(0.34 * node**-0.95 for node in range(1, nodes + 1))


class AdaptiveDrafter(Drafter[AdaptiveState]):
    """Builds the most likely tree from matrix rows and a chain copied from the context.

    Beyond the paper (docs/drafting.md): rows keep probabilities and are averaged over time; pairs
    and triples of tokens have rows of their own; the tokens that followed an earlier occurrence of
    the last n-gram are one more branch (the chain); what these sources say of a candidate is
    calibrated by how often its kind was right, and mixed with weights learnt online; the
    distributions behind rejected nodes are a row for the next root; and the tree consists of the
    best nodes by these scores, not of a fixed shape.
    """

    name = "adaptive"
    matrix: AdjacencyMatrix
    logits: Any  # float64 [f], log odds of the calibrated rates, computed from the evidence

    def __init__(
        self,
        matrix: AdjacencyMatrix,
        nodes: int = defaults.AUTOMATIC_NODES,
        *,
        pairs: int = PAIRS,
        triples: int = TRIPLES,
        old_weight: float = OLD_WEIGHT,
        chain: int = CHAIN,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        """Draft from ``matrix``; slots, evidence and weights are added if it has none.

        Args:
            matrix: shared by all rows of a batch.
            nodes: nodes below the root, 1 to 256.
            pairs: slots for pairs of tokens; 0: none.
            triples: slots for triples; 0: none.
            old_weight: weight of the old row in an average; 0: the new row replaces it.
            chain: most tokens copied from the context; 0: none.
            learning_rate: of the weights of the sources; 0: these stay as they are.

        Raises:
            TokenRecyclingError: ``nodes`` is not within 1..256.
        """
        if not 1 <= nodes <= defaults.LARGEST_DRAFT:
            raise TokenRecyclingError(
                f"nodes is {nodes}; it must be between 1 and {defaults.LARGEST_DRAFT}"
            )
        self.matrix, self.nodes, self.old_weight = matrix, nodes, old_weight
        self.learning_rate = learning_rate
        self.chain_length = chain
        self.max_depth = min(chain + DEEPER, nodes)
        matrix.reserve(pairs, triples)
        matrix.assume_probabilities()
        self._views = Views()
        self._rates = expected_rates(matrix.k)
        self.logits = np.zeros_like(self._rates)
        if matrix.evidence.shape[1] != len(self._rates):
            shape = (2, len(self._rates))
            matrix.evidence = torch.zeros(shape, dtype=torch.float32, device="cpu")
        shape = (SETS + PATTERNS, INPUTS)
        if matrix.weights.shape != shape:
            matrix.weights = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self._acceptance = expected_acceptance(nodes)

    @property
    def full_size(self) -> int:
        """Nodes of a whole draft, root included."""
        return self.nodes + 1

    @property
    def acceptance(self) -> tuple[float, ...]:
        """What text and model bring on average, used until drafts have scores."""
        return self._acceptance

    def _tables(self) -> Tables:
        """Return views of what has been learnt."""
        matrix = self.matrix
        learnt = self._views.of(
            matrix.all_candidates,
            matrix.all_probabilities,
            matrix.keys,
            matrix.evidence,
            matrix.weights,
        )
        sizes = matrix.vocab_size, matrix.pairs, matrix.triples
        return Tables._make((*sizes, *learnt, self._rates, self.logits))

    def new_state(self, batch: int, capacity: int | None = None) -> AdaptiveState:
        """Return empty contexts."""
        context = Context.empty(batch, capacity, self.max_depth + 2)
        chains = Chains.none(batch, self.chain_length)
        return AdaptiveState(context, chains, RootCandidates.none(batch, self.matrix.k))

    def load(self, state: AdaptiveState, texts: list[list[int]]) -> None:
        """Load the texts as context."""
        state.context.load(texts)
        state.chains.clear()
        state.root_rows.clear()
        self.calibrate()

    def calibrate(self) -> None:
        """Compute the log odds of all features; a matrix without weights gets the first ones."""
        if not bool(self.matrix.weights.any()):
            self.matrix.weights.copy_(torch.from_numpy(initial_weights()))
        refresh_logits(self._tables())

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Select tokens without a row, each at its last occurrence."""
        return self.matrix.unseen(tokens)

    def learn_prompt(self, tokens: Tensor, candidates: Candidates, mask: Tensor) -> None:
        """Store rows of prompt tokens; none for pairs, as the preceding tokens are unknown here."""
        k = candidates.ids.shape[-1]
        self.matrix.update(
            tokens.flatten(),
            candidates.ids.reshape(-1, k),
            candidates.probabilities.reshape(-1, k),
            (mask.cpu().numpy() & candidates.finite).reshape(-1),
        )

    def propose(self, state: AdaptiveState, roots: Tensor, size: int | None = None) -> DraftTree:
        """Build the tree."""
        if size == 1:
            state.context.append_roots(roots)
            state.chains.clear()
            return root_only(roots)
        state.context.reserve(1)
        n = self.nodes + 1 if size is None else min(size, self.nodes + 1)
        batch = len(roots)
        tokens, parents, depths = np.empty((3, batch, n), np.int64)
        ancestors, valid = np.empty((batch, n, n), np.bool_), np.empty((batch, n), np.bool_)
        scores = np.empty((batch, n), np.float32)
        drafts = Drafts(tokens, parents, depths, ancestors, valid, scores)
        arrays, first, tables = state.arrays(), as_array(roots), self._tables()

        def run(part: slice) -> None:
            own = Drafts(*(array[part] for array in drafts))
            propose(arrays.part(part), first[part], tables, self.max_depth, own)

        in_threads(batch, THREAD_NODES // n, run)
        return DraftTree(
            torch.from_numpy(tokens),
            torch.from_numpy(parents),
            torch.from_numpy(depths),
            torch.from_numpy(ancestors),
            torch.from_numpy(valid),
            min(self.max_depth, n - 1),
            torch.from_numpy(scores),
        )

    def sources(self, state: AdaptiveState, draft: DraftTree) -> list[str]:
        """Return "root", "chain", the longest context whose row has the token, or "last step"."""
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        length = int(state.context.lengths[0])
        before = [NO_TOKEN, NO_TOKEN, *state.context.tokens[0, :length].tolist()][-3:-1]
        chain = state.chains.tokens[0, : max(int(state.chains.counts[0]), 0)].tolist()
        tables = self._tables()
        paths = [[*before, tokens[0]]]  # of each node: two tokens before the root, then its branch
        names = ["root"]
        for node in range(1, len(tokens)):
            path = paths[parents[node]]
            paths.append([*path, tokens[node]])
            drafted = paths[-1][3:]
            if drafted == chain[: len(drafted)]:
                names.append("chain")
                continue
            second, first, token = path[-3:]
            in_rows = [
                source
                for level, source in enumerate(ROW_NAMES)
                if (row := find(level, second, first, token, tables)) >= 0
                and tokens[node] in tables.candidates[row]
            ]
            names.append(in_rows[-1] if in_rows else "last step")
        return names

    def observe(
        self, state: AdaptiveState, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Learn from the candidates of all nodes, and extend the context (``learn.observe``)."""
        state.context.reserve(accepted.emitted.shape[1])
        verified = Verified(
            as_array(draft.tokens),
            as_array(draft.parents),
            as_array(draft.valid),
            *candidates,
            as_array(accepted.path),
            as_array(accepted.emitted),
        )
        observe(state.arrays(), verified, self._tables(), self.old_weight, self.learning_rate)
