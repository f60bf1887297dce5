"""The stopping criteria of a ``generate`` call, asked token by token, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
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
        scores: Callable[[], Any],
    ) -> None:
        """Set the rules.

        Args:
            criteria: the prepared ``StoppingCriteriaList``.
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
                self._eos.update(criterion.eos_token_id.tolist())
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
