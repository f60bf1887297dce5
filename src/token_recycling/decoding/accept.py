"""Lossless acceptance: the longest draft path that the target would have generated itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.samplers import Sampler, are_node_wise
from token_recycling.decoding.sequence import Sequence
from token_recycling.decoding.walks import children_of, follow, host_walk, longest_paths
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.candidates import argmax
from token_recycling.drafting.draft import DraftTree
from token_recycling.util.tokens import NO_TOKEN, padded


class Appended(NamedTuple):
    """What a step appended to its sequences.

    Attributes:
        tokens: per row, the emitted tokens up to where the row ends.
        reasons: per row, why it ended in this step, or None.
        drafted: per row, the number of valid nodes below the root.
    """

    tokens: list[list[int]]
    reasons: list[str | None]
    drafted: list[int]


class Acceptor(Protocol):
    """Chooses the emitted tokens from the target's logits along the draft."""

    def __call__(
        self, draft: DraftTree, logits: Tensor, sequences: list[Sequence], best: Any = None
    ) -> tuple[Accepted, Appended]:
        """Accept a path of ``draft`` by ``logits`` [B, n, V]; append its tokens to ``sequences``.

        A row whose root is invalid emits nothing. ``best``: the result of ``greedy`` as an array,
        if it is known.
        """


def greedy(logits: Tensor) -> Tensor:
    """Return the target's greedy choices, int64 [B, n], from its logits [B, n, V].

    Float64 logits are rounded to float32 first, as ``generate`` does, so that ties are the same.
    """
    if logits.dtype == torch.float64:
        logits = logits.float()
    return argmax(logits)


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


def append_emitted(rows: list[list[int]], sequences: list[Sequence]) -> Appended:
    """Append the emitted tokens of a step to their sequences, up to where each row ends.

    Args:
        rows: for each, the number of drafted nodes, then the emitted tokens (see ``step_summary``).
        sequences: one per row; a sequence that had ended before gets nothing.
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
    return Appended(tokens, reasons, drafted)


def accept_and_append(
    draft: DraftTree, choices: Tensor, sequences: list[Sequence]
) -> tuple[Accepted, Appended]:
    """Accept the longest path along ``choices`` and append its tokens to the sequences.

    Args:
        draft: on the host.
        choices: int64 [B, n], the target's choice after each node.
        sequences: one per row.
    """
    path, emitted = np.empty((2, len(choices), draft.max_depth + 1), np.int64)
    counts = np.empty((2, len(choices)), np.int64)
    host_walk(
        as_array(draft.tokens),
        as_array(draft.parents),
        as_array(draft.depths),
        as_array(draft.valid),
        as_array(choices.cpu()),
        path,
        emitted,
        counts,
    )
    valid, found = counts.tolist()
    rows = [[n - 1, *row[:count]] for n, row, count in zip(valid, emitted.tolist(), found)]
    appended = append_emitted(rows, sequences)
    kept = [len(tokens) for tokens in appended.tokens]
    for row, (count, before) in enumerate(zip(kept, found)):
        if count < before:  # it ends
            emitted[row, count:], counts[1, row] = NO_TOKEN, count
    longest = max(1, *kept)
    columns = path[:, :longest], emitted[:, :longest], counts[1]
    return Accepted(*map(torch.from_numpy, columns)), appended


class GreedyAcceptor:
    """Accepts by argmax: all rows and nodes at once, with one read by the host."""

    def __call__(
        self, draft: DraftTree, logits: Tensor, sequences: list[Sequence], best: Any = None
    ) -> tuple[Accepted, Appended]:
        """Accept the longest path along the argmax tokens."""
        choices = greedy(logits) if best is None else torch.from_numpy(best)
        return accept_and_append(draft, choices, sequences)


# (ids int64 [1, t], logits float32 [1, V]) -> scores [1, V]
Processors = Callable[[Tensor, Tensor], Tensor]
# (row, logits float32 [1, V], scores float32 [1, V]), called for every chosen token in order
OnChoice = Callable[[int, Tensor, Tensor], None]


class FollowAcceptor:
    """Chooses each token as plain decoding would and follows it as long as the draft contains it.

    For sampling, and for greedy decoding with processors or log probabilities (see ``hf.call``).

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
        self._node_wise = [are_node_wise(row) for row in processors]

    def _choose(self, row: int, sequence: Sequence, logits: Tensor) -> int:
        """Choose the token that follows ``sequence`` from ``logits`` float32 [1, V]."""
        if self._node_wise[row] and self.on_choice is None:
            scores = logits
            for processor in cast("Any", self.processors[row]):
                scores = processor(None, scores)
        else:
            logits = logits.clone()  # a processor may write to it
            scores = self.processors[row](sequence.ids(logits.device), logits).reshape(1, -1)
        token = scores.argmax(dim=-1) if self.sampler is None else self.sampler(row, scores)
        if self.on_choice is not None:
            self.on_choice(row, logits, scores)
        return int(token)

    def __call__(
        self, draft: DraftTree, logits: Tensor, sequences: list[Sequence], best: Any = None
    ) -> tuple[Accepted, Appended]:
        """Walk every row's tree from its root."""
        with ordinary_tensors():  # processors may be third-party code
            return self._follow(draft, logits.float(), sequences)

    def _follow(
        self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]
    ) -> tuple[Accepted, Appended]:
        children, valid = children_of(draft), draft.valid.tolist()
        reasons: list[str | None] = [None] * len(sequences)

        def choose(rows: list[int], nodes: list[int]) -> list[int]:
            tokens = []
            for row, node in zip(rows, nodes):
                token = self._choose(row, sequences[row], logits[row, node][None])
                reasons[row] = sequences[row].append(token)
                if reasons[row]:
                    children[row].clear()
                tokens.append(token)
            return tokens

        paths, tokens = follow(
            [row for row, row_valid in enumerate(valid) if row_valid[0]], children, choose
        )
        emitted = torch.tensor(padded(tokens), dtype=torch.long, device="cpu")
        path = torch.tensor(padded(paths, fill=0), dtype=torch.long, device="cpu")
        drafted = [max(sum(row) - 1, 0) for row in valid]
        counts = torch.tensor([len(row) for row in tokens], device="cpu")
        return Accepted(path, emitted, counts), Appended(tokens, reasons, drafted)
