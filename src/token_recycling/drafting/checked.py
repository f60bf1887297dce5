"""Drafters of other people, whose every draft is checked before it is verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from skinny_kernels.errors import one_line
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import PROMPTS, AnyDrafter, Drafter, DrafterState
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.host.check import FAULTS, find_fault
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.errors import TokenRecyclingError, printable

OURS = "token_recycling."  # whose drafters are tested instead
PARTS = ("tokens", "parents", "depths")


def checked(drafter: AnyDrafter, vocab_size: int) -> AnyDrafter:
    """Return a drafter whose drafts may be verified: one of ours as it is, another one checked."""
    known = type(drafter).__module__.startswith(OURS) or isinstance(drafter, CheckedDrafter)
    return drafter if known else CheckedDrafter(drafter, vocab_size)


class CheckedDrafter(Drafter[Any]):
    """Calls a drafter of somebody else and checks what it returns.

    Whatever is wrong or raised is a ``TokenRecyclingError`` of one line that names the drafter.

    Attributes:
        inner: the drafter.
        largest: nodes of its largest draft so far, the root included.
    """

    def __init__(self, inner: AnyDrafter, vocab_size: int) -> None:
        """Check the drafts of ``inner`` for a vocabulary of this size."""
        self.inner, self._vocab_size, self.largest = inner, vocab_size, 1
        self.name = type(inner).__name__  # until it is known
        with self._calling("name"):
            self.name = printable(inner.name)
        if inner.prompts not in PROMPTS:
            problem = f"{inner.prompts!r}; choose from {', '.join(PROMPTS)}"
            raise TokenRecyclingError(f"prompts of the drafter {self.name} is {problem}")
        self.prompts = inner.prompts

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Turn what the drafter raises into one line."""
        try:
            yield
        except TokenRecyclingError:
            raise
        except Exception as error:  # whatever somebody else's code raises
            line = one_line(f"{type(error).__name__}: {error}", 200)
            raise TokenRecyclingError(f"the drafter {self.name} fails in {what}: {line}") from error

    @property
    def matrix(self) -> AdjacencyMatrix | None:  # type: ignore[override]
        """That of the drafter."""
        with self._calling("matrix"):
            return self.inner.matrix

    @property
    def k(self) -> int:
        """That of the drafter."""
        with self._calling("k"):
            return int(self.inner.k)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Those of the drafter."""
        with self._calling("acceptance"):
            return tuple(map(float, self.inner.acceptance))

    def new_state(self, batch: int, capacity: int | None = None) -> DrafterState:
        """Return new state of the drafter."""
        with self._calling("new_state"):
            state: DrafterState = self.inner.new_state(batch, capacity)
        return state

    def load(self, state: DrafterState, texts: list[list[int]]) -> None:
        """Load the texts."""
        with self._calling("load"):
            self.inner.load(state, texts)

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Return the drafter's mask.

        Raises:
            TokenRecyclingError: it is not bool, or of another shape.
        """
        with self._calling("prompt_mask"):
            mask = self.inner.prompt_mask(tokens)
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or (mask.shape, mask.dtype) != (tokens.shape, torch.bool):
            self._refuse(f"prompt_mask must return bool {list(tokens.shape)} or None")
        return mask

    def learn_prompt(self, tokens: Tensor, candidates: Candidates, mask: Tensor) -> None:
        """Let the drafter learn."""
        with self._calling("learn_prompt"):
            self.inner.learn_prompt(tokens, candidates, mask)

    def propose(self, state: DrafterState, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return the drafter's drafts, the first ``size`` nodes of them.

        Raises:
            TokenRecyclingError: they are no drafts below ``roots``.
        """
        with self._calling("propose"):
            draft = self.inner.propose(state, roots.clone(), size)
        if not isinstance(draft, DraftTree):
            self._refuse(f"it is a {type(draft).__name__}; propose must return a DraftTree")
        deepest = self._check(draft, roots)
        self.largest = max(self.largest, draft.size if size is None else min(size, draft.size))
        scores = None if draft.scores is None else draft.scores.detach()
        return replace(draft, max_depth=deepest, scores=scores).first(size)

    def _check(self, draft: DraftTree, roots: Tensor) -> int:
        """Check a draft; return its largest depth."""
        tokens, batch = draft.tokens, len(roots)
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.shape[1]:
            self._refuse(f"tokens must be a tensor int64 [{batch}, n]")
        n = tokens.shape[1]
        if tokens.shape[0] != batch:
            self._refuse(f"it has {tokens.shape[0]} rows; {batch} were asked for")
        for name in PARTS:
            self._check_part(name, getattr(draft, name), torch.long, (batch, n))
        self._check_part("ancestors", draft.ancestors, torch.bool, (batch, n, n))
        self._check_part("valid", draft.valid, torch.bool, (batch, n))
        if draft.scores is not None:
            self._check_part("scores", draft.scores, torch.float32, (batch, n))
            if not bool(draft.scores.isfinite().all()):
                self._refuse("scores must be finite")
        arrays = (tokens, draft.parents, draft.depths, draft.ancestors, draft.valid)
        numbers: Any = (as_array(roots), *map(as_array, arrays), self._vocab_size)
        row, fault = find_fault(*numbers)
        if fault >= 0:
            problem = FAULTS[fault].format(last_token=self._vocab_size - 1)
            self._refuse(f"{problem} (row {row})")
        return int(row)

    def _check_part(self, name: str, part: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        kind = str(dtype).removeprefix("torch.")
        if (
            not isinstance(part, Tensor)
            or part.dtype != dtype
            or part.shape != shape
            or not part.is_cpu
            or part.layout is not torch.strided
        ):
            self._refuse(f"{name} must be a tensor {kind} {list(shape)} on the CPU")

    def _refuse(self, problem: str) -> None:
        raise TokenRecyclingError(f"the draft of {self.name} is wrong: {problem}")

    def sources(self, state: DrafterState, draft: DraftTree) -> list[str]:
        """Return those of the drafter."""
        with self._calling("sources"):
            return self.inner.sources(state, draft)

    def observe(
        self, state: DrafterState, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Let the drafter learn."""
        with self._calling("observe"):
            self.inner.observe(state, draft, candidates, accepted)
