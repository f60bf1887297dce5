"""A scored tree that knows its context: pairs of tokens, averaged rows, a chain, calibration."""

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

WINDOW = 16  # tokens of the longest run that is looked for
PAIRS = 32749  # rows for pairs of tokens, a prime: 1.75 MiB with k = 8
OLD_WEIGHT = 0.4  # weight of the old row in an average
CHAIN = 16  # tokens of a chain
MOST_NODES = 256
COUNTED = 2  # steps from one that calibrates to the next


@dataclass
class AdaptiveRows(Rows):
    """What the adaptive drafter keeps of each row.

    Attributes:
        context: the tokens so far, the root of the last draft included.
        match: what the last draft's chain was copied from; None where none was grown.
        steps: observed since ``load``, where candidates are not counted at every step.
    """

    context: Context
    match: NgramMatch | None = None
    steps: int = 0

    def previous(self) -> Tensor:
        """Return the tokens before the roots, int64 [B]."""
        return self.context.last(2)[:, 0]

    def counts_now(self) -> bool:
        """Every second step is enough; a graph is the same at every step."""
        if self.context.capacity is not None:
            return True
        self.steps += 1
        return self.steps % COUNTED == 0


class AdaptiveDrafter(Drafter[AdaptiveRows]):
    """Grows the most likely tree from rows with probabilities and a chain from the context.

    Beyond the paper (docs/drafting.md): rows keep probabilities and are averaged over time; pairs
    of tokens have rows of their own; what followed the last n-gram in this context is one more
    branch; every candidate's score is calibrated by how often its kind was right; and the tree
    has the best nodes by these scores, not a fixed shape.
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
        """Draft from ``matrix``, which gets room for ``pairs`` and evidence if it has none.

        Args:
            matrix: shared by every row of a batch.
            nodes: below the root, 256 at most; fewer where so few candidates have no more.
            pairs: rows for pairs of tokens; 0: none.
            old_weight: weight of the old row in an average; 0: the latest row stays.
            chain: tokens copied from the context at most; 0: none.
            calibrate: count how often candidates are right; else expect their probabilities.

        Raises:
            TokenRecyclingError: ``nodes`` is not within 1..256.
        """
        if not 1 <= nodes <= MOST_NODES:
            raise TokenRecyclingError(f"nodes is {nodes}; it must lie between 1 and {MOST_NODES}")
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
        """That of the ranked tree, until drafts bring their own."""
        return self._acceptance

    def new_rows(self, batch: int, capacity: int | None = None) -> AdaptiveRows:
        """Return empty contexts."""
        device, margin = self.matrix.device, self.builder.max_depth + 2
        context = Context.empty(batch, WINDOW, device, capacity, margin)
        match = NgramMatch.none(batch, self.builder.chain_length, device)
        return AdaptiveRows(context, None if capacity is None else match)

    def load(self, rows: AdaptiveRows, texts: list[list[int]]) -> None:
        """Take the texts as context."""
        rows.context.load(texts)
        rows.match, rows.steps = None, 0
        self.calibration.refresh()

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Ask for tokens without a row, each at its last occurrence."""
        return self.matrix.unseen(tokens)

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Recycle a part of the prompts; the token before each is not known here."""
        ids, p, finite = self._best(logits)
        mask = mask & finite
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), p.flatten(0, 1), mask.flatten())

    def propose(self, rows: AdaptiveRows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Grow the tree."""
        rows.context.append_roots(roots)
        if nodes == 1:
            rows.match = None
            return root_only(roots)
        rows.match = self.matcher(rows.context, self.builder.chain_length)
        return self.builder(roots, rows.previous(), rows.match).first(nodes)

    def sources(self, rows: AdaptiveRows, draft: DraftTree) -> list[str]:
        """Say "chain", "pair" or "token"; a token's row may stand in for a pair's."""
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        chain: list[int] = []
        if rows.match is not None:
            chain = rows.match.tokens[0][rows.match.valid[0]].tolist()
        on_chain = [0] + [-1] * (len(tokens) - 1)  # tokens of the chain up to the node
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
        """Count what was right, average the rows of every node, and extend the context."""
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
        """Return the k best candidates of [..., V] logits and their probabilities among themselves.

        The sum over the whole vocabulary would cost more than it tells. The last tensor, bool
        [...], is False where logits have overflowed and there are no probabilities.
        """
        logits = logits[..., : self.matrix.vocab_size]
        if logits.device.type == "cpu":
            logits = logits.float()  # sorting half precision takes longer than this copy
        values, ids = logits.topk(self.matrix.k, dim=-1)
        probabilities = values.float().softmax(dim=-1)
        return ids, probabilities, probabilities.isfinite().all(dim=-1)

    def _count(self, roots: Tensor, previous: Tensor, emitted: Tensor, chain: NgramMatch) -> None:
        """Count which candidates were right along the emitted text, drafted or not.

        Args:
            roots: int64 [B].
            previous: int64 [B], the tokens before the roots.
            emitted: int64 [B, t]; ``NO_TOKEN`` behind the last token of a row.
            chain: what was found for these roots.
        """
        steps = emitted.shape[1]
        nodes = torch.cat([roots[:, None], emitted[:, :-1]], dim=1).clamp(min=0)
        before = torch.cat([previous[:, None], nodes[:, :-1]], dim=1)
        live = emitted != NO_TOKEN
        # The text is on the chain as long as it took the chain's tokens.
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
