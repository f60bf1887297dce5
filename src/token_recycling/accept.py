"""Lossless acceptance: the longest draft path that the target would have generated itself."""

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
    """What a step emits, as tensors on the device and as lists on the host.

    Inside a graph step the host has not read anything yet, and the lists are empty.

    Attributes:
        path: int64 [B, p]; ``path[b, :counts[b]]`` are the accepted nodes, the root first.
        emitted: int64 [B, p], the token that the target chose after each of these nodes, the
            bonus token last; padded with ``NO_TOKEN``.
        counts: int64 [B], emitted tokens per row; 0 for a row that had ended before. For a row
            that ends in this step it may exceed the length of ``tokens``.
        tokens: per row, the emitted tokens up to where the row ends.
        reasons: per row, why it ended in this step, or None.
        drafted: per row, the number of valid nodes below the root.
    """

    path: Tensor
    emitted: Tensor
    counts: Tensor
    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class Acceptor(Protocol):
    """Chooses the emitted tokens from the target's logits along the draft."""

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Accept a path of ``draft`` by ``logits`` [B, n, V]; append its tokens to ``sequences``.

        A row whose root is invalid emits nothing.
        """


def longest_paths(draft: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Find the deepest node whose whole path agrees with the target's choices.

    Args:
        draft: B trees of n nodes.
        choices: int64 [B, n], the token that the target chooses after each node.

    Returns:
        The path from the root, int64 [B, max_depth + 1], and its number of nodes, int64 [B]
        (0 where the root is invalid). Among nodes of equal depth the first wins.
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
    """Return the target's greedy choices, int64 [B, n], from its logits [B, n, V].

    Float64 logits are rounded to float32 first, as ``generate`` does, so that ties are the same.
    """
    if logits.dtype == torch.float64:
        logits = logits.float()
    return logits.max(dim=-1).indices  # takes a third of argmax's time in bfloat16


def overflowed(logits: Tensor) -> Tensor:
    """Return bool [], True when non-finite hidden states have produced NaN logits [B, n, V].

    The LM head spreads them over the whole vocabulary, so checking one token is enough.
    """
    return logits[..., :1].isnan().any()


def accept_choices(draft: DraftTree, choices: Tensor) -> Accepted:
    """Accept the longest path along the target's choices, int64 [B, n], on the device alone."""
    path, counts = longest_paths(draft, choices)
    behind = torch.arange(path.shape[1], device=path.device) >= counts[:, None]
    return Accepted(path, choices.gather(1, path).masked_fill(behind, NO_TOKEN), counts)


def step_summary(draft: DraftTree, accepted: Accepted) -> Tensor:
    """Pack everything that the host reads of a step into one tensor, int64 [B, p + 1].

    The first column is the number of drafted nodes; the emitted tokens follow.
    """
    return torch.cat([draft.valid.sum(dim=1, keepdim=True) - 1, accepted.emitted], dim=1)


def append_emitted(
    rows: list[list[int]], sequences: list[Sequence]
) -> tuple[list[list[int]], list[str | None], list[int]]:
    """Append the emitted tokens of a step to their sequences, up to where each row ends.

    Args:
        rows: the result of ``step_summary`` as lists.
        sequences: one per row; a sequence that had ended before gets nothing.

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
    """Accept the longest path along ``choices`` and append its tokens to the sequences."""
    found = accept_choices(draft, choices)
    tokens, reasons, drafted = append_emitted(step_summary(draft, found).tolist(), sequences)
    longest = max(1, *map(len, tokens))
    path, emitted = found.path[:, :longest], found.emitted[:, :longest]
    return Accepted(path, emitted, found.counts.clamp(max=longest), tokens, reasons, drafted)


class GreedyAcceptor:
    """Accepts by argmax: all rows and nodes at once, with one read by the host."""

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Accept the longest path along the argmax tokens."""
        return accept_and_append(draft, greedy(logits), sequences)


def _from_host(
    path: Tensor, tokens: list[list[int]], reasons: list[str | None], drafted: list[int]
) -> Accepted:
    """Build the result of choices that were made on the host."""
    rows = [row + [NO_TOKEN] * (path.shape[1] - len(row)) for row in tokens]
    emitted = torch.tensor(rows, device=path.device)
    return Accepted(path, emitted, (emitted != NO_TOKEN).sum(dim=1), tokens, reasons, drafted)


# (ids int64 [1, t], logits float32 [1, V]) -> scores [1, V]
Processors = Callable[[Tensor, Tensor], Tensor]
# (row, logits float32 [1, V], scores float32 [1, V]), called for every chosen token in order
OnChoice = Callable[[int, Tensor, Tensor], None]


class FollowAcceptor:
    """Chooses each token as plain decoding would and follows it as long as the draft contains it.

    The logits processors run on the followed path only, so their calls and the random numbers
    drawn are those of plain decoding: the same seed gives the same text, whatever the draft.
    """

    def __init__(
        self,
        processors: list[Processors],
        sampler: Sampler | None,
        on_choice: OnChoice | None = None,
    ) -> None:
        """Choose tokens with these processors.

        Args:
            processors: one per row, called with the row's padding, prompt and answer.
            sampler: draws a token; None: take the argmax.
            on_choice: called with the logits and scores of every chosen token.
        """
        self.processors, self.sampler, self.on_choice = processors, sampler, on_choice

    def _choose(self, row: int, sequence: Sequence, logits: Tensor) -> Tensor:
        """Choose the token, int64 [], that follows ``sequence``, from ``logits`` [V]."""
        with ordinary_tensors():  # processors may be third-party code
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
