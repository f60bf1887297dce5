"""The default drafter: scored trees from token pairs, averaged rows and a chain, calibrated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from token_recycling import defaults
from token_recycling.accept import Accepted
from token_recycling.drafters.base import Drafter, Rows
from token_recycling.drafters.calibration import Calibration
from token_recycling.drafters.ngram import Context, NgramMatch, NgramMatcher
from token_recycling.drafters.sources import NO_MATCH, ChainSource, RowSource
from token_recycling.drafters.tree_builder import TreeBuilder
from token_recycling.errors import TokenRecyclingError
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tokens import NO_TOKEN
from token_recycling.tree import DraftTree, TreeTemplate, root_only

WINDOW = 16  # longest run of agreeing tokens searched for in the context
PAIRS = 32749  # slots for pairs of tokens, a prime number: 1.75 MiB with k = 8
OLD_WEIGHT = 0.4  # weight of the old row in an average
CHAIN = 16  # longest chain
LARGEST_DRAFT = 256
COUNTED = 2  # in the eager loop, candidates are counted every so many steps


@dataclass
class AdaptiveRows(Rows):
    """The adaptive drafter's state of each row.

    Attributes:
        context: the tokens so far, including the root of the last draft.
        match: the match that gave the chain of the last draft; None if that was root-only.
        steps: steps observed since ``load``; used only if candidates are not counted every step.
    """

    context: Context
    match: NgramMatch | None = None
    steps: int = 0

    def previous(self) -> Tensor:
        """Return the token before each root, int64 [B]."""
        return self.context.last(2)[:, 0]

    def counts_now(self) -> bool:
        """Return True if this step is to be counted: every second one, or every one in a graph."""
        if self.context.capacity is not None:
            return True
        self.steps += 1
        return self.steps % COUNTED == 0


class AdaptiveDrafter(Drafter[AdaptiveRows]):
    """Builds the most likely tree from matrix rows and a chain copied from the context.

    Beyond the paper (docs/drafting.md): rows keep probabilities and are averaged over time; pairs
    of tokens have rows of their own; the tokens that followed an earlier occurrence of the last
    n-gram are one more branch (the chain); every candidate's score is calibrated by how often its
    kind was right; and the tree consists of the best nodes by these scores, not of a fixed shape.
    """

    name = "adaptive"
    matrix: AdjacencyMatrix
    needs_logits = True
    capturable = True

    def __init__(
        self,
        matrix: AdjacencyMatrix,
        nodes: int = defaults.MOST_NODES,
        *,
        pairs: int = PAIRS,
        old_weight: float = OLD_WEIGHT,
        chain: int = CHAIN,
        calibrate: bool = True,
    ) -> None:
        """Draft from ``matrix``; slots for pairs and evidence are added if it has none.

        Args:
            matrix: shared by all rows of a batch.
            nodes: nodes below the root, 1 to 256; a small k may allow only fewer.
            pairs: slots for pairs of tokens; 0: none.
            old_weight: weight of the old row in an average; 0: the new row replaces it.
            chain: most tokens copied from the context; 0: none.
            calibrate: count how often candidates are right. False: rely on expected rates.

        Raises:
            TokenRecyclingError: ``nodes`` is not within 1..256.
        """
        if not 1 <= nodes <= LARGEST_DRAFT:
            raise TokenRecyclingError(f"nodes is {nodes}; it must be between 1 and {LARGEST_DRAFT}")
        self.matrix, self.old_weight, self.calibrate = matrix, old_weight, calibrate
        matrix.reserve_pairs(pairs)
        matrix.assume_probabilities()
        self.rows, self.chains = RowSource(matrix), ChainSource(matrix.device)
        expected = torch.cat([self.rows.expected(), self.chains.expected()])
        if matrix.evidence.shape[1] != len(expected):
            matrix.evidence = torch.zeros(
                2, len(expected), dtype=torch.float32, device=matrix.device
            )
        self.calibration = Calibration(matrix.evidence, expected)
        self.builder = TreeBuilder(self.rows, self.chains, self.calibration, nodes, chain)
        self.matcher = NgramMatcher(WINDOW, matrix.device)
        ranked = TreeTemplate.load("ranked").acceptance[: self.builder.nodes]
        self._acceptance = ranked + ranked[-1:] * (self.builder.nodes - len(ranked))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance probabilities of the ranked tree, used until drafts have scores."""
        return self._acceptance

    def new_rows(self, batch: int, capacity: int | None = None) -> AdaptiveRows:
        """Return empty contexts."""
        device, margin = self.matrix.device, self.builder.max_depth + 2
        context = Context.empty(batch, WINDOW, device, capacity, margin)
        match = NgramMatch.none(batch, self.builder.chain_length, device)
        return AdaptiveRows(context, None if capacity is None else match)

    def load(self, rows: AdaptiveRows, texts: list[list[int]]) -> None:
        """Load the texts as context."""
        rows.context.load(texts)
        rows.match, rows.steps = None, 0
        self.calibration.refresh()

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Select tokens without a row, each at its last occurrence."""
        return self.matrix.unseen(tokens)

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Store rows of prompt tokens; none for pairs, as the preceding tokens are unknown here."""
        ids, p, finite = self._best(logits)
        mask = mask & finite
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), p.flatten(0, 1), mask.flatten())

    def propose(self, rows: AdaptiveRows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Build the tree."""
        rows.context.append_roots(roots)
        if nodes == 1:
            rows.match = None
            return root_only(roots)
        rows.match = self.matcher(rows.context, self.builder.chain_length)
        return self.builder(roots, rows.previous(), rows.match).first(nodes)

    def sources(self, rows: AdaptiveRows, draft: DraftTree) -> list[str]:
        """Return "root", "chain", "pair" or "token" (no pair row has the node's token) per node."""
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        chain: list[int] = []
        if rows.match is not None:
            chain = rows.match.tokens[0][rows.match.valid[0]].tolist()
        # Number of chain tokens from the root to the node; -1 if the node is off the chain.
        on_chain = [0] + [-1] * (len(tokens) - 1)
        found = ["root"] * len(tokens)
        for node in range(1, len(tokens)):
            above = parents[node]
            depth = on_chain[above]
            if 0 <= depth < len(chain) and tokens[node] == chain[depth]:
                on_chain[node], found[node] = depth + 1, "chain"
                continue
            previous = tokens[parents[above]] if above else int(rows.previous()[0])
            where = torch.tensor(previous), torch.tensor(tokens[above])
            row, known = self.matrix.rows(*(x.to(self.matrix.device) for x in where))
            in_pair = bool(known) and tokens[node] in self.matrix.fetch(row)[0].tolist()
            found[node] = "pair" if in_pair else "token"
        return found

    def observe(
        self, rows: AdaptiveRows, draft: DraftTree, logits: Tensor, accepted: Accepted
    ) -> None:
        """Count right candidates, average the rows of all nodes, and extend the context."""
        roots, previous = draft.tokens[:, 0], rows.previous()
        if self.calibrate and rows.match is not None and rows.counts_now():
            self._count(roots, previous, accepted.emitted, rows.match)
        ids, p, finite = self._best(logits)
        before = draft.tokens.gather(1, draft.parents)
        before[:, 0] = previous
        self.matrix.average(
            before.flatten(),
            draft.tokens.flatten(),
            ids.flatten(0, 1),
            p.flatten(0, 1),
            (draft.valid & finite).flatten(),
            old_weight=self.old_weight,
        )
        rows.context.append_accepted(accepted)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k best candidates of logits [..., V] and their softmax over these k.

        A softmax over the whole vocabulary would cost more than it gains. The third tensor, bool
        [...], is False where logits have overflowed and the probabilities are not finite.
        """
        logits = logits[..., : self.matrix.vocab_size]
        if logits.device.type == "cpu":
            logits = logits.float()  # faster: topk in half precision takes longer than this copy
        values, ids = logits.topk(self.matrix.k, dim=-1)
        probabilities = values.float().softmax(dim=-1)
        return ids, probabilities, probabilities.isfinite().all(dim=-1)

    def _count(self, roots: Tensor, previous: Tensor, emitted: Tensor, chain: NgramMatch) -> None:
        """Count which candidates were right along the emitted tokens, whether drafted or not.

        Args:
            roots: int64 [B].
            previous: int64 [B], the token before each root.
            emitted: int64 [B, t], padded with ``NO_TOKEN``.
            chain: the match for these roots.
        """
        steps = emitted.shape[1]
        nodes = torch.cat([roots[:, None], emitted[:, :-1]], dim=1).clamp(min=0)
        before = torch.cat([previous[:, None], nodes[:, :-1]], dim=1)
        live = emitted != NO_TOKEN
        # The chain applies as long as all tokens emitted so far were the chain's.
        below = torch.full_like(emitted, NO_MATCH)
        length = min(steps, chain.tokens.shape[1])
        below[:, :length] = chain.tokens.masked_fill(~chain.valid, NO_MATCH)[:, :length]
        follows = (below == emitted).long().cumprod(dim=1)
        has = (below != NO_MATCH) & live
        has[:, 1:] &= follows[:, :-1].bool()
        below = below.masked_fill(~has, NO_MATCH)

        ids, features = self.rows.both(before, nodes, ChainSource.state(chain)[:, None] * has)
        there = live[..., None] & (ids != NO_TOKEN) & (ids != below[..., None])
        self.calibration.count(features, ids == emitted[..., None], there)
        depth = torch.arange(steps, device=emitted.device)
        of_chain = self.chains.of(chain, below, depth, ids) + self.rows.features
        self.calibration.count(of_chain, below == emitted, has)
        self.calibration.refresh()
