"""The stopping criteria of a ``generate`` call, asked as plain decoding asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from token_recycling.accept import Sequences

# These look at every row by itself. One of another class may look at the whole batch, and time
# ends all rows of a batch at the same token.
ROW_BY_ROW = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def looks_at_batch(criterion: Any) -> bool:
    """True for a criterion that wants all rows of a batch at the same token."""
    return type(criterion) not in ROW_BY_ROW


class CriteriaRules:
    """Says after which token a row ends, as the criteria would after a forward per token.

    The three that every call has are answered on the host; a tensor each per token would cost
    more than the rest of a step. All others get what ``generate`` hands them: the row's ids,
    padding in front, and the scores so far.
    """

    def __init__(
        self,
        criteria: Sequence[Any],
        rows: Sequence[Sequence[int]],
        device: torch.device | str,
        scores: Callable[[], Any] = lambda: None,
    ) -> None:
        """Set the rules.

        Args:
            criteria: the prepared ``StoppingCriteriaList``, or a part of it.
            rows: ids so far per row, the padding included; criteria count it.
            device: where criteria expect the ids.
            scores: called for what criteria get as ``scores``.
        """
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
        self._lengths = [len(row) for row in rows]
        self._sequences = Sequences(rows, device) if self._called else None
        self._scores = scores

    def __call__(self, row: int, token: int) -> str | None:
        """Return "eos", "stop" or "length" when ``row`` ends with ``token``, else None."""
        self._lengths[row] += 1
        stopped = False
        if self._sequences is not None:
            self._sequences.append(row, token)
            ids = self._sequences[row]
            for criterion in self._called:  # all of them: they may count their calls
                stopped |= bool(torch.as_tensor(criterion(ids, self._scores())).any())
        if token in self._eos:
            return "eos"
        if stopped:
            return "stop"
        if self._lengths[row] >= self._limit or time.time() > self._deadline:
            return "length"
        return None


class ColumnRules:
    """Rules of a batch with criteria that look at all rows at once.

    Plain decoding asks them after every column of new tokens. Rows of recycled decoding are not
    in step, so what a row is ahead is held back: a column is asked about once every row has
    reached it, or has ended before. Then ``emit`` gets the column's tokens, one a row.

    Where the call has no end-of-sequence id, plain decoding pads no row: one that has ended goes
    on until all have.
    """

    def __init__(
        self,
        own: CriteriaRules,
        criteria: Sequence[Any],
        input_ids: Tensor,
        pad: int | None,
        emit: Callable[[int, int, bool], None],
    ) -> None:
        """Set the rules.

        Args:
            own: those of each row.
            criteria: those of the whole batch.
            input_ids: int64 [B, L], the padded prompts.
            pad: what stands in a row that has ended; None: what it would go on with.
            emit: called with row, token and whether the row's text ends with it.
        """
        self._own, self._criteria, self._pad, self._emit = own, criteria, pad, emit
        self._ids = input_ids
        batch = input_ids.shape[0]
        self._ahead: list[list[tuple[int, str | None]]] = [[] for _ in range(batch)]
        self._ended = [False] * batch  # as plain decoding has it, at the column asked about last

    def __call__(self, row: int, token: int) -> str | None:
        """Return why ``row`` ends with ``token``, or has ended before it, else None."""
        if self._is_over(row):
            return "stop"
        reason = self._own(row, token)
        self._ahead[row].append((token, reason))
        while not all(self._ended) and self._column_is_known():
            self._ask()
        return "stop" if reason is None and self._is_over(row) else reason

    def _is_over(self, row: int) -> bool:
        return all(self._ended) or (self._pad is not None and self._ended[row])

    def _column_is_known(self) -> bool:
        return all(ahead or self._is_over(row) for row, ahead in enumerate(self._ahead))

    def _ask(self) -> None:
        over = [self._is_over(row) for row in range(len(self._ended))]
        column = [
            (self._pad or 0, None) if done else ahead.pop(0)
            for done, ahead in zip(over, self._ahead)
        ]
        tokens = torch.tensor([[token] for token, _ in column], device=self._ids.device)
        self._ids = torch.cat([self._ids, tokens], dim=1)
        stops = torch.zeros(len(column), dtype=torch.bool, device=self._ids.device)
        for criterion in self._criteria:  # all of them: they may count their calls
            stops = stops | torch.as_tensor(criterion(self._ids, None), device=stops.device)
        for row, ((_, reason), stopped) in enumerate(zip(column, stops.tolist())):
            self._ended[row] |= bool(stopped) or reason is not None
        for row, (token, _) in enumerate(column):
            if not over[row]:
                self._emit(row, token, self._is_over(row))
