"""Lossless acceptance: the longest path of the draft that the target would have written itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from token_recycling.draws import Draw
from token_recycling.tree import DraftTree

HOLE = -1  # where there is no token

# (row, token) -> why the row ends with this token, or None. Called once per token, in order.
Stop = Callable[[int, int], "str | None"]


@dataclass(frozen=True)
class Accepted:
    """What a step emits: on the device, and as the host reads it.

    Inside a fused step the host has not read anything yet, and its lists are empty.

    Attributes:
        path: int64 [B, p]; ``path[b, :counts[b]]`` are the nodes whose answers were taken, the
            root first.
        emitted: int64 [B, p], the tokens after these nodes, the last one the bonus token;
            ``HOLE`` behind them.
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

    def __call__(self, draft: DraftTree, logits: Tensor, stop: Stop) -> Accepted:
        """Walk ``draft`` by ``logits`` [B, n, V]; a row whose root is invalid emits nothing."""


def chains(tokens: Tensor) -> DraftTree:
    """Return drafts without branches: ``tokens`` int64 [B, n], the roots first."""
    batch, n = tokens.shape
    depths = torch.arange(n, device=tokens.device)
    ancestors = depths[:, None] >= depths
    return DraftTree(
        tokens,
        (depths - 1).clamp(min=0).expand(batch, n),
        depths.expand(batch, n),
        ancestors.expand(batch, n, n),
        torch.ones_like(tokens, dtype=torch.bool),
        n - 1,
    )


def bare_roots(tokens: Tensor) -> DraftTree:
    """Return the draft of nothing but roots (int64 [B]): a plain decoding step."""
    return chains(tokens[:, None])


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
    return Accepted(path, choices.gather(1, path).masked_fill(behind, HOLE), counts)


def packed(draft: DraftTree, accepted: Accepted) -> Tensor:
    """Put all that the host wants to know of a step into one tensor, int64 [B, p + 1]."""
    return torch.cat([draft.valid.sum(dim=1, keepdim=True) - 1, accepted.emitted], dim=1)


def read(
    rows: list[list[int]], stop: Stop, active: Sequence[bool] | None = None
) -> tuple[list[list[int]], list[str | None], list[int]]:
    """Read ``rows`` of ``packed``: tokens, reasons and drafted nodes of each (see ``Accepted``).

    ``stop`` is asked token by token, and not at all for rows that are not ``active``.
    """
    tokens: list[list[int]] = []
    reasons: list[str | None] = []
    drafted: list[int] = []
    for row, (nodes, *emitted) in enumerate(rows):
        kept: list[int] = []
        reason = None
        on = active is None or active[row]
        for token in emitted if on else ():
            if token == HOLE:
                break
            kept.append(token)
            if reason := stop(row, token):
                break
        tokens.append(kept)
        reasons.append(reason)
        drafted.append(max(nodes, 0) if on else 0)
    return tokens, reasons, drafted


def accept_read(draft: DraftTree, choices: Tensor, stop: Stop) -> Accepted:
    """Accept the longest path of ``choices``, and let the host read it."""
    found = accept_choices(draft, choices)
    tokens, reasons, drafted = read(packed(draft, found).tolist(), stop)
    longest = max(1, *map(len, tokens))
    path, emitted = found.path[:, :longest], found.emitted[:, :longest]
    return Accepted(path, emitted, found.counts.clamp(max=longest), tokens, reasons, drafted)


class GreedyAcceptor:
    """The target's choice is its argmax; whole trees at once, one read by the host."""

    def __call__(self, draft: DraftTree, logits: Tensor, stop: Stop) -> Accepted:
        """Accept the longest path of argmaxes."""
        return accept_read(draft, greedy(logits), stop)


def told(
    path: Tensor, tokens: list[list[int]], reasons: list[str | None], drafted: list[int]
) -> Accepted:
    """Return what the host decided, with its tensors."""
    rows = [row + [HOLE] * (path.shape[1] - len(row)) for row in tokens]
    emitted = torch.tensor(rows, device=path.device)
    return Accepted(path, emitted, (emitted != HOLE).sum(dim=1), tokens, reasons, drafted)


# (sequence int64 [1, t], logits float32 [1, V]) -> scores [1, V]
Processors = Callable[[Tensor, Tensor], Tensor]
# (row, logits float32 [1, V], scores float32 [1, V]) of every token chosen, in order
OnChoice = Callable[[int, Tensor, Tensor], None]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that may be written to and kept, inside inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Keep a caller's autocast away from what is not the model's own computation."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class Sequences:
    """Rows of tokens that grow one by one, each readable as a tensor without a copy."""

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device | str) -> None:
        """Begin with ``rows``."""
        self.lengths = [len(row) for row in rows]
        self._rows = [torch.tensor([list(row)], device=device) for row in rows]

    def append(self, row: int, token: Tensor | int) -> None:
        """Append a token to a row."""
        length = self.lengths[row]
        if length == self._rows[row].shape[1]:  # room by doubling, not a copy per token
            self._rows[row] = self._rows[row].repeat(1, 2)
        self._rows[row][0, length] = token
        self.lengths[row] = length + 1

    def __getitem__(self, row: int) -> Tensor:
        """Return a row, int64 [1, t]."""
        return self._rows[row][:, : self.lengths[row]]


class FollowAcceptor:
    """Sample-and-follow: choose a token as plain decoding would, follow it while the draft has it.

    The logits processors run along the walked path only, so their calls and the random numbers
    drawn are those of plain decoding: the same seed gives the same text, whatever the draft.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        processors: Sequence[Processors],
        draw: Draw | None,
        device: torch.device | str,
        on_choice: OnChoice | None = None,
    ) -> None:
        """Follow one sequence per row.

        Args:
            prompts: per row the tokens so far; processors see them.
            processors: per row.
            draw: samples a token; None: take the argmax.
            device: of the logits.
            on_choice: gets logits and scores of every token chosen.
        """
        self.sequences = Sequences(prompts, device)
        self.processors, self.draw, self.on_choice = processors, draw, on_choice

    def _choose(self, row: int, logits: Tensor) -> Tensor:
        """Choose a token, int64 [], from ``logits`` [V] and append it to the row's sequence."""
        with ordinary_tensors():  # processors are other people's code
            whole = logits[None].float().clone()
            scores = self.processors[row](self.sequences[row], whole).reshape(1, -1)
            token = scores.argmax(dim=-1) if self.draw is None else self.draw(row, scores)
            self.sequences.append(row, token[0])
            if self.on_choice is not None:
                self.on_choice(row, whole, scores)
            return token[0]

    def __call__(self, draft: DraftTree, logits: Tensor, stop: Stop) -> Accepted:
        """Walk every row's tree from its root."""
        state: list[list[int]] = torch.stack(
            [draft.valid[:, 0].long(), draft.valid.sum(dim=1) - 1], dim=1
        ).tolist()
        path = torch.zeros_like(draft.tokens[:, :1]).repeat(1, draft.max_depth + 1)
        tokens: list[list[int]] = [[] for _ in state]
        reasons: list[str | None] = [None] * len(state)
        for row, (alive, _) in enumerate(state):
            node, depth = 0, 0
            while alive:
                path[row, depth] = node
                chosen = self._choose(row, logits[row, node])
                below = draft.valid[row] & (draft.parents[row] == node)
                child = below & (draft.tokens[row] == chosen)
                child[0] = False
                token, alive, node = torch.stack(
                    [chosen, child.any().long(), child.long().argmax()]
                ).tolist()
                depth += 1
                tokens[row].append(token)
                if reason := stop(row, token):
                    reasons[row] = reason
                    break
        drafted = [max(count, 0) for _, count in state]
        return told(path, tokens, reasons, drafted)
