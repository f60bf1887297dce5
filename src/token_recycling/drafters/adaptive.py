"""A scored tree that knows its context: pairs of tokens, averaged rows, a chain, calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling import defaults
from token_recycling.accept import HOLE, Accepted
from token_recycling.adjacency import EMPTY, AdjacencyMatrix
from token_recycling.drafters.base import Drafter
from token_recycling.drafters.calibration import Calibration
from token_recycling.drafters.context import Context, Continuation, none_of
from token_recycling.drafters.growth import Growth
from token_recycling.drafters.sources import NO_TOKEN, ChainSource, RowSource
from token_recycling.errors import TokenRecyclingError
from token_recycling.tree import DraftTree, TreeTemplate

WINDOW = 16  # tokens of the longest run that is looked for
PAIRS = 32749  # rows for pairs of tokens, a prime: 1.75 MiB with k = 8
KEEP = 0.4  # weight of the old row in an average
CHAIN = 16  # tokens of a chain
MOST_NODES = 256
COUNTED = 2  # steps from one that calibrates to the next


class AdaptiveDrafter(Drafter):
    """Grows the most likely tree from rows with probabilities and a chain from the context.

    Beyond the paper (docs/drafting.md): rows keep probabilities and are averaged over time; pairs
    of tokens have rows of their own; what followed the last n-gram in this context is one more
    branch; every candidate's score is calibrated by how often its kind was right; and the tree
    has the best nodes by these scores, not a fixed shape.
    """

    name = "adaptive"
    needs_logits = True
    fixed_shapes = True

    def __init__(
        self,
        matrix: AdjacencyMatrix,
        nodes: int = defaults.MOST_NODES,
        *,
        pairs: int = PAIRS,
        keep: float = KEEP,
        chain: int = CHAIN,
        calibrate: bool = True,
    ) -> None:
        """Draft from ``matrix``, which gets room for ``pairs`` and evidence if it has none.

        Args:
            matrix: shared by every row of a batch.
            nodes: below the root, 256 at most; fewer where so few candidates have no more.
            pairs: rows for pairs of tokens; 0: none.
            keep: weight of the old row in an average; 0: the latest row stays.
            chain: tokens copied from the context at most; 0: none.
            calibrate: count how often candidates are right; else expect their probabilities.

        Raises:
            TokenRecyclingError: ``nodes`` is not within 1..256.
        """
        if not 1 <= nodes <= MOST_NODES:
            raise TokenRecyclingError(f"nodes is {nodes}; it must lie between 1 and {MOST_NODES}")
        self.matrix, self.keep, self.calibrate = matrix, keep, calibrate
        matrix.keep_pairs(pairs)
        matrix.assume_probabilities()
        self.rows, self.chains = RowSource(matrix), ChainSource(matrix.device)
        expected = torch.cat([self.rows.expected(), self.chains.expected()])
        if matrix.evidence.shape[1] != len(expected):
            matrix.evidence = torch.zeros(
                2, len(expected), dtype=torch.float32, device=matrix.device
            )
        self.calibration = Calibration(matrix.evidence, expected)
        self.growth = Growth(self.rows, self.chains, self.calibration, nodes, chain)
        self._chain: Continuation | None = None
        self._steps = 0
        ranked = TreeTemplate.load("ranked").shares[: self.growth.nodes]
        self._shares = ranked + ranked[-1:] * (self.growth.nodes - len(ranked))

    @property
    def shares(self) -> tuple[float, ...]:
        """Those of the ranked tree, until drafts bring their own."""
        return self._shares

    def start(self, prompts: list[list[int]]) -> None:
        """Take the prompts as the first context."""
        self.context = Context(prompts, WINDOW, self.matrix.device)
        self.calibration.refresh()
        self._steps = 0

    def settle(self, prompts: list[list[int]], room: int) -> None:
        """Take the rows' tokens into a context of fixed size."""
        held = getattr(self, "context", None)
        if held is not None and held.room == room and len(held.tokens) == len(prompts):
            held.restart(prompts)
        else:
            self.context = Context(prompts, WINDOW, self.matrix.device, room)
        self._roots = self._previous = torch.zeros_like(self.context.lengths)
        self._chain = None
        self.calibration.refresh()

    def held(self) -> dict[str, Tensor]:
        """Return the rows' contexts, and what the last draft hung on."""
        batch, context = len(self.context.tokens), self.context
        chain = self._chain or none_of(batch, self.growth.chain_length, context.tokens.device)
        return {
            "tokens": context.tokens,
            "lengths": context.lengths,
            "roots": self._roots,
            "previous": self._previous,
            "chain": chain.tokens,
            "chain_valid": chain.valid,
            "chain_run": chain.run,
        }

    def hold(self, rows: dict[str, Tensor]) -> None:
        """Go on with other rows, whose contexts get room for a step."""
        context = self.context.of(rows["tokens"], rows["lengths"])
        self.context = context.slid(self.growth.max_depth + 2)
        self._roots, self._previous = rows["roots"], rows["previous"]
        self._chain = Continuation(rows["chain"], rows["chain_valid"], rows["chain_run"])

    def _counts_now(self) -> bool:
        """Every second step will do; a graph is the same at every step."""
        if self.context.room is not None:
            return True
        self._steps += 1
        return self._steps % COUNTED == 0

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Want the tokens without a row, each where it stands last."""
        return self.matrix.unseen(tokens)

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        """Recycle a part of the prompts; what stood before each token is not known."""
        ids, p, finite = self._best(logits)
        valid = valid & finite
        self.matrix.update(tokens.flatten(), ids.flatten(0, 1), p.flatten(0, 1), valid.flatten())

    def rest(self, roots: Tensor) -> DraftTree:
        """Take the roots into the context."""
        self.context.append(roots[:, None], torch.ones_like(roots))
        self._previous = self.context.last(2)[:, 0]
        self._roots, self._chain = roots, None
        return super().rest(roots)

    def propose(self, roots: Tensor) -> DraftTree:
        """Grow the tree."""
        self.rest(roots)
        self._chain = self.context.continuation(self.growth.chain_length)
        return self.growth(roots, self._previous, self._chain)

    def sources(self, draft: DraftTree) -> list[str]:
        """Say "chain", "pair" or "token"; a token's row may stand in for a pair's."""
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        chain: list[int] = []
        if self._chain is not None:
            chain = self._chain.tokens[0][self._chain.valid[0]].tolist()
        on_chain = [0] + [-1] * (len(tokens) - 1)  # tokens of the chain up to the node
        found = ["root"] * len(tokens)
        for node in range(1, len(tokens)):
            above = parents[node]
            depth = on_chain[above]
            if 0 <= depth < len(chain) and tokens[node] == chain[depth]:
                on_chain[node], found[node] = depth + 1, "chain"
                continue
            previous = tokens[parents[above]] if above else int(self._previous[0])
            where = torch.tensor(previous), torch.tensor(tokens[above])
            row, known = self.matrix.rows(*(x.to(self.matrix.device) for x in where))
            in_pair = bool(known) and tokens[node] in self.matrix.fetch(row)[0].tolist()
            found[node] = "pair" if in_pair else "token"
        return found

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Count what was right, average the rows of every node, and go on in the context."""
        if self.calibrate and self._chain is not None and self._counts_now():
            self._count(accepted.emitted, self._chain)
        ids, p, finite = self._best(logits)
        before = draft.tokens.gather(1, draft.parents)
        before[:, 0] = self._previous
        self.matrix.average(
            before.flatten(),
            draft.tokens.flatten(),
            ids.flatten(0, 1),
            p.flatten(0, 1),
            (draft.valid & finite).flatten(),
            keep=self.keep,
        )
        self.context.follow(accepted)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k best candidates of [..., V] logits and their shares among themselves.

        The sum over the whole vocabulary would cost more than it tells. The last tensor, bool
        [...], is False where logits have overflowed and there are no shares.
        """
        logits = logits[..., : self.matrix.vocab_size]
        if logits.device.type == "cpu":
            logits = logits.float()  # sorting half precision takes longer than this copy
        values, ids = logits.topk(self.matrix.k, dim=-1)
        shares = values.float().softmax(dim=-1)
        return ids, shares, shares.isfinite().all(dim=-1)

    def _count(self, emitted: Tensor, chain: Continuation) -> None:
        """Count which candidates were right along the text: ``emitted`` int64 [B, t], holes last.

        A candidate counts wherever the text came by, drafted or not.
        """
        steps = emitted.shape[1]
        nodes = torch.cat([self._roots[:, None], emitted[:, :-1]], dim=1).clamp(min=0)
        before = torch.cat([self._previous[:, None], nodes[:, :-1]], dim=1)
        live = emitted != HOLE
        # The text is on the chain as long as it took the chain's tokens.
        below = torch.full_like(emitted, NO_TOKEN)
        length = min(steps, chain.tokens.shape[1])
        below[:, :length] = chain.tokens.masked_fill(~chain.valid, NO_TOKEN)[:, :length]
        follows = (below == emitted).long().cumprod(dim=1)
        has = (below != NO_TOKEN) & live
        has[:, 1:] &= follows[:, :-1].bool()
        below = below.masked_fill(~has, NO_TOKEN)

        ids, features = self.rows.both(before, nodes, ChainSource.state(chain)[:, None] * has)
        there = live[..., None] & (ids != EMPTY) & (ids != below[..., None])
        self.calibration.count(features, ids == emitted[..., None], there)
        place = torch.arange(steps, device=emitted.device)
        of_chain = self.chains.of(chain, below, place, ids) + self.rows.features
        self.calibration.count(of_chain, below == emitted, has)
        self.calibration.refresh()
