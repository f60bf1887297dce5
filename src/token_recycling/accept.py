"""Lossless acceptance: the longest path of the draft that the target would have written itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from token_recycling.modes import ordinary_tensors
from token_recycling.samplers import Sampler
from token_recycling.sequence import Sequence
from token_recycling.tokens import NO_TOKEN
from token_recycling.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    """What a step emits: on the device, and as the host reads it.

    Inside a fused step the host has not read anything yet, and its lists are empty.

    Attributes:
        path: int64 [B, p]; ``path[b, :counts[b]]`` are the nodes whose answers were taken, the
            root first.
        emitted: int64 [B, p], the tokens after these nodes, the last one the bonus token;
            ``NO_TOKEN`` behind them.
        counts: int64 [B], 0 for a row that had ended before. A row that ends in this step may
            count more than ``tokens`` has.
        tokens: per row the emitted tokens, cut where the row ends.
        reasons: per row why it ended in this step, or None.
        drafted: per row the valid nodes below the root.
    """

    path: Tensor
    emitted: Tensor
    counts: Tensor
    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class Acceptor(Protocol):
    """Chooses tokens from the target's logits along the draft."""

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Walk ``draft`` by ``logits`` [B, n, V] and append what is emitted to ``sequences``.

        A row whose root is invalid emits nothing.
        """


def longest_paths(draft: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Find the deepest node whose whole path agrees with the target's choices.

    Args:
        draft: B trees of n nodes.
        choices: int64 [B, n], the token that the target puts after each node.

    Returns:
        The path from the root, int64 [B, max_depth + 1], and its number of nodes, int64 [B]
        (0 where the root is invalid). On equal depth the first node wins.
    """
    batch, n = draft.tokens.shape
    wrong = (draft.tokens != choices.gather(1, draft.parents)) | ~draft.valid
    wrong[:, 0] = ~draft.valid[:, 0]
    cut = (draft.ancestors & wrong[:, None, :]).any(dim=2)
    depth = draft.depths.masked_fill(cut, -1)
    deepest, best = depth.max(dim=1, keepdim=True)
    on_path = draft.ancestors.gather(1, best[:, :, None].expand(batch, 1, n))[:, 0]
    return draft.path_of(on_path), deepest[:, 0] + 1


def greedy(logits: Tensor) -> Tensor:
    """Return the target's choices int64 [B, n] by its logits [B, n, V].

    In float64 ``generate`` rounds to float32 first, and what is equal then is a tie.
    """
    if logits.dtype == torch.float64:
        logits = logits.float()
    return logits.max(dim=-1).indices  # argmax, but a third of its time in bfloat16


def overflowed(logits: Tensor) -> Tensor:
    """Return bool []: hidden states that are not finite reached the logits [B, n, V].

    A projection spreads them over the whole vocabulary, so one token tells.
    """
    return logits[..., :1].isnan().any()


def accept_choices(draft: DraftTree, choices: Tensor) -> Accepted:
    """Accept the longest path of the target's choices, int64 [B, n], without the host."""
    path, counts = longest_paths(draft, choices)
    behind = torch.arange(path.shape[1], device=path.device) >= counts[:, None]
    return Accepted(path, choices.gather(1, path).masked_fill(behind, NO_TOKEN), counts)


def step_summary(draft: DraftTree, accepted: Accepted) -> Tensor:
    """Put everything that the host reads of a step into one tensor, int64 [B, p + 1].

    The first column is the number of drafted nodes; then come the emitted tokens.
    """
    return torch.cat([draft.valid.sum(dim=1, keepdim=True) - 1, accepted.emitted], dim=1)


def append_emitted(
    rows: list[list[int]], sequences: list[Sequence]
) -> tuple[list[list[int]], list[str | None], list[int]]:
    """Append the emitted tokens of a step to their sequences, up to where each row ends.

    Args:
        rows: of ``step_summary``, on the host.
        sequences: one per row; one that had ended before gets nothing.

    Returns:
        Tokens, finish reasons and drafted nodes of each row (see ``Accepted``).
    """
    tokens: list[list[int]] = [[] for _ in rows]
    drafted = [0] * len(rows)
    reasons: list[str | None] = [None] * len(rows)
    for row, (sequence, (nodes, *emitted)) in enumerate(zip(sequences, rows)):
        if not sequence.active:
            continue
        drafted[row] = max(nodes, 0)
        for token in emitted:
            if token == NO_TOKEN:
                break
            tokens[row].append(token)
            if reason := sequence.append(token):
                reasons[row] = reason
                break
    return tokens, reasons, drafted


def accept_and_append(draft: DraftTree, choices: Tensor, sequences: list[Sequence]) -> Accepted:
    """Accept the longest path of ``choices`` and append it to the sequences on the host."""
    found = accept_choices(draft, choices)
    tokens, reasons, drafted = append_emitted(step_summary(draft, found).tolist(), sequences)
    longest = max(1, *map(len, tokens))
    path, emitted = found.path[:, :longest], found.emitted[:, :longest]
    return Accepted(path, emitted, found.counts.clamp(max=longest), tokens, reasons, drafted)


class GreedyAcceptor:
    """The target's choice is its argmax; whole trees at once, one read by the host."""

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Accept the longest path of argmaxes."""
        return accept_and_append(draft, greedy(logits), sequences)


def _from_host(
    path: Tensor, tokens: list[list[int]], reasons: list[str | None], drafted: list[int]
) -> Accepted:
    """Return what the host decided, with its tensors."""
    rows = [row + [NO_TOKEN] * (path.shape[1] - len(row)) for row in tokens]
    emitted = torch.tensor(rows, device=path.device)
    return Accepted(path, emitted, (emitted != NO_TOKEN).sum(dim=1), tokens, reasons, drafted)


# (ids int64 [1, t], logits float32 [1, V]) -> scores [1, V]
Processors = Callable[[Tensor, Tensor], Tensor]
# (row, logits float32 [1, V], scores float32 [1, V]) of every token chosen, in order
OnChoice = Callable[[int, Tensor, Tensor], None]


class FollowAcceptor:
    """Sample-and-follow: choose a token as plain decoding would, follow it while the draft has it.

    The logits processors run along the walked path only, so their calls and the random numbers
    drawn are those of plain decoding: the same seed gives the same text, whatever the draft.
    """

    def __init__(
        self,
        processors: list[Processors],
        sampler: Sampler | None,
        on_choice: OnChoice | None = None,
    ) -> None:
        """Choose tokens.

        Args:
            processors: per row; they see the row's padding, prompt and answer.
            sampler: draws a token; None: take the argmax.
            on_choice: gets logits and scores of every token chosen.
        """
        self.processors, self.sampler, self.on_choice = processors, sampler, on_choice

    def _choose(self, row: int, sequence: Sequence, logits: Tensor) -> Tensor:
        """Choose the token, int64 [], that follows ``sequence`` by ``logits`` [V]."""
        with ordinary_tensors():  # processors are other people's code
            whole = logits[None].float().clone()
            scores = self.processors[row](sequence.ids(logits.device), whole).reshape(1, -1)
            token = scores.argmax(dim=-1) if self.sampler is None else self.sampler(row, scores)
            if self.on_choice is not None:
                self.on_choice(row, whole, scores)
            return token[0]

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Walk every row's tree from its root."""
        state: list[list[int]] = torch.stack(
            [draft.valid[:, 0].long(), draft.valid.sum(dim=1) - 1], dim=1
        ).tolist()
        path = torch.zeros_like(draft.tokens[:, :1]).repeat(1, draft.max_depth + 1)
        tokens: list[list[int]] = [[] for _ in state]
        reasons: list[str | None] = [None] * len(state)
        for row, (sequence, (alive, _)) in enumerate(zip(sequences, state)):
            node, depth = 0, 0
            while alive:
                path[row, depth] = node
                chosen = self._choose(row, sequence, logits[row, node])
                below = draft.valid[row] & (draft.parents[row] == node)
                child = below & (draft.tokens[row] == chosen)
                child[0] = False
                token, alive, node = torch.stack(
                    [chosen, child.any().long(), child.long().argmax()]
                ).tolist()
                depth += 1
                tokens[row].append(token)
                if reason := sequence.append(token):
                    reasons[row] = reason
                    break
        drafted = [max(count, 0) for _, count in state]
        return _from_host(path, tokens, reasons, drafted)
