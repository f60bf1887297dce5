"""The protocol of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from token_recycling.accept import Accepted, bare_roots
from token_recycling.tree import DraftTree


class Drafter(ABC):
    """Proposes a draft tree for every row of a batch and learns from what the target answers.

    The loop calls ``start`` once, ``wants`` and ``prime`` for every chunk of the prompts, then
    ``propose`` and ``observe`` once per step. A drafter that keeps an adjacency matrix holds it
    in ``matrix``.
    """

    name: str
    needs_logits = False  # what the target answers, not only what it emits
    # ``propose`` and ``observe`` are tensor functions of fixed shapes: they write in place, and
    # neither read from the device nor look at what the host knows. So a graph can hold them.
    fixed_shapes = False

    @property
    def shares(self) -> tuple[float, ...]:
        """How often each node below the root is expected to be right, none above the one before.

        A drafter that says so proposes the most useful nodes first: any first n of its nodes are
        its draft of n, and ``BudgetDrafter`` may cut it. Empty: its drafts are taken whole.
        """
        return ()

    def start(self, prompts: list[list[int]]) -> None:  # noqa: B027
        """Begin a batch of sequences."""

    def settle(self, prompts: list[list[int]], room: int) -> None:  # noqa: B027
        """Begin a batch for a fused step, in the same tensors whenever ``room`` is the same.

        Args:
            prompts: the tokens of every row so far.
            room: tokens that a row may come to.
        """

    def held(self) -> dict[str, Tensor]:
        """Return what it keeps of each row, a tensor [B, …] each; the rest is of all rows.

        For batches whose rows come and go (see ``serving``), after ``settle``.
        """
        return {}

    def hold(self, rows: dict[str, Tensor]) -> None:  # noqa: B027
        """Go on with other rows: what ``held`` returned, of B rows that need not be the same."""

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Say which tokens of a chunk of the prompts, int64 [B, c], it wants to be primed with.

        Their logits cost time, and so does whatever is learnt from them.

        Returns:
            bool [B, c]; None: not one.
        """
        return None

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:  # noqa: B027
        """Learn from the tokens that it wanted, and others of the same columns.

        Args:
            tokens: int64 [B, w].
            logits: [B, w, V], the target's answer at each of them.
            valid: bool [B, w]; False where it was not wanted, or a row's prompt has ended before.
        """

    @abstractmethod
    def propose(self, roots: Tensor) -> DraftTree:
        """Return a draft below ``roots`` (int64 [B], the last token of every row)."""

    def rest(self, roots: Tensor) -> DraftTree:
        """Return the draft of nothing but ``roots``, for a step of plain decoding."""
        return bare_roots(roots)

    def draft(self, roots: Tensor, nodes: int) -> DraftTree:
        """Return the first ``nodes`` nodes, the root included, of a draft below ``roots``.

        A draft of one node is not grown at all.
        """
        return self.rest(roots) if nodes == 1 else self.propose(roots).first(nodes)

    def sources(self, draft: DraftTree) -> list[str]:
        """Say of each node of the first row where it came from, before it is observed."""
        return [self.name] * draft.tokens.shape[1]

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:  # noqa: B027
        """Learn from the target's answer to every node, rejected ones too.

        Args:
            draft: what was proposed; only its valid nodes count.
            logits: [B, n, V].
            accepted: what became of it.
        """
