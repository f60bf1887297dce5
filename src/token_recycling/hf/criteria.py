"""The stopping criteria of a ``generate`` call, evaluated as in plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.sequence import Sequence

# Criteria that treat each row independently. Other classes may look at the whole batch, and
# ``MaxTimeCriteria`` ends all rows of a batch at the same token.
ROW_BY_ROW = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def looks_at_batch(criterion: Any) -> bool:
    """Return whether a criterion needs all rows of a batch at the same token."""
    return type(criterion) not in ROW_BY_ROW


class CriteriaRule:
    """Stop rule that ends a row where the criteria would with one forward per token.

    Maximum length, end-of-sequence and maximum time are checked on the host, because a tensor per
    token and criterion would cost more than the rest of a step. All others are called as by
    ``generate``, with the row's left-padded ids and the scores so far.
    """

    def __init__(
        self,
        criteria: Iterable[Any],
        device: torch.device | str,
        scores: Callable[[], Any] = lambda: None,
    ) -> None:
        """Apply ``criteria``.

        Args:
            criteria: the prepared ``StoppingCriteriaList``, or a part of it.
            device: where criteria expect the ids.
            scores: returns the ``scores`` passed to criteria.
        """
        self._device, self._scores = device, scores
        self._limit = float("inf")
        self._eos: set[int] = set()
        self._deadline = float("inf")
        self._called = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                self._limit = min(self._limit, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxTimeCriteria:
                end = criterion.initial_timestamp + criterion.max_time
                self._deadline = min(self._deadline, end)
            else:
                self._called.append(criterion)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of padding, prompt and answer after which rows end; None: no limit is known."""
        return None if self._limit == float("inf") else int(self._limit)

    def __call__(self, sequence: Sequence) -> str | None:
        """Return "eos", "stop" or "length" if the row ends with its last token, else None."""
        stopped = False
        if self._called:
            with ordinary_tensors():  # criteria are user code
                ids = sequence.ids(self._device)
                for criterion in self._called:  # no short-circuit: they may count calls
                    stopped |= bool(torch.as_tensor(criterion(ids, self._scores())).any())
        if sequence.tokens[-1] in self._eos:
            return "eos"
        if stopped:
            return "stop"
        if sequence.padded_length >= self._limit or time.time() > self._deadline:
            return "length"
        return None


class BatchCriteria:
    """Criteria that look at all rows of a batch at once.

    Plain decoding evaluates them after every column of new tokens. In speculative decoding rows
    are at different tokens, so a column is evaluated once every row has a token in it or has
    ended before it.

    If the call has no end-of-sequence id, plain decoding does not pad rows: a row that has ended
    continues until all have.
    """

    def __init__(
        self,
        own: CriteriaRule,
        criteria: Iterable[Any],
        input_ids: Tensor,
        pad: int | None,
        sequences: list[Sequence],
        released: list[int],
        on_release: Callable[[int, bool], None],
    ) -> None:
        """Apply ``criteria`` to a batch; pass ``rule(row)`` to every row's ``Sequence``.

        Args:
            own: the criteria that look at one row.
            criteria: those that look at the whole batch.
            input_ids: int64 [B, L], the padded prompts.
            pad: the token that follows in a row that has ended; None: the row's own next token.
            sequences: the rows; may be filled later.
            released: number of final new tokens of each row, updated by ``on_release``.
            on_release: called for every final token, with its row and whether the row ends there.
        """
        self._row_rule, self._criteria, self._pad = own, list(criteria), pad
        self._ids, self._on_release = input_ids, on_release
        self._sequences, self._released = sequences, released
        batch = input_ids.shape[0]
        self._reasons: list[list[str | None]] = [[] for _ in range(batch)]  # of every new token
        self._ended = [False] * batch  # in plain decoding, at the last released column

    def rule(self, row: int) -> Callable[[Sequence], str | None]:
        """Return the stop rule of a row."""
        return lambda sequence: self._appended(row, sequence)

    def _appended(self, row: int, sequence: Sequence) -> str | None:
        """Return why ``row`` ends with its last token or ended before it, else None."""
        if self._is_over(row):
            return "stop"
        reason = self._row_rule(sequence)
        self._reasons[row].append(reason)
        with ordinary_tensors():  # criteria and streamers are user code
            while not all(self._ended) and self._column_is_known():
                self._ask()
        return "stop" if reason is None and self._is_over(row) else reason

    def _is_over(self, row: int) -> bool:
        return all(self._ended) or (self._pad is not None and self._ended[row])

    def _column_is_known(self) -> bool:
        return all(
            len(reasons) > self._released[row] or self._is_over(row)
            for row, reasons in enumerate(self._reasons)
        )

    def _ask(self) -> None:
        over = [self._is_over(row) for row in range(len(self._ended))]
        column = [(self._pad or 0) if done else self._token(row) for row, done in enumerate(over)]
        tokens = torch.tensor([[token] for token in column], device=self._ids.device)
        self._ids = torch.cat([self._ids, tokens], dim=1)
        stops = torch.zeros(len(column), dtype=torch.bool, device=self._ids.device)
        for criterion in self._criteria:  # no short-circuit: they may count calls
            stops = stops | torch.as_tensor(criterion(self._ids, None), device=stops.device)
        for row, stopped in enumerate(stops.tolist()):
            reason = None if over[row] else self._reasons[row][self._released[row]]
            self._ended[row] |= bool(stopped) or reason is not None
        for row, done in enumerate(over):
            if not done:
                self._on_release(row, self._is_over(row))

    def _token(self, row: int) -> int:
        sequence = self._sequences[row]
        return sequence.tokens[sequence.prompt_length + self._released[row]]
