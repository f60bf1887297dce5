"""How often each node of a drafter's drafts is right, whatever part of them is verified."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.tree import DraftTree

EVERY = 4  # steps from one watched draft to the next
MEMORY = 50.0  # watched drafts after which an old one counts 1/e
PRIOR = 4.0  # watched drafts that the expected shares count for


class Acceptance:
    """Compares every few steps a whole draft with the text that then came.

    The nodes that were cut off are judged like the others, so the estimate does not depend on
    the size of the drafts that were verified.
    """

    def __init__(self, shares: Sequence[float], device: torch.device | str) -> None:
        """Expect ``shares``, per node below the root how often right, until seen otherwise."""
        self._shares = torch.tensor(shares, dtype=torch.float32, device=device)
        self._right = torch.zeros_like(self._shares)  # decayed counts
        self._promised = torch.zeros_like(self._shares)
        self._there = torch.zeros_like(self._shares)
        self._watched = 0.0
        self._draft: DraftTree | None = None
        self._steps = 0

    def start(self) -> None:
        """Begin other texts."""
        self._draft = None

    def watch(self, draft: DraftTree) -> None:
        """Take the whole draft of a step; most are let go."""
        self._steps += 1
        if self._draft is None and self._steps >= EVERY:
            self._draft, self._steps = draft, 0
            self._texts: list[list[int]] = [[] for _ in range(len(draft.tokens))]
            self._ended = [False] * len(draft.tokens)

    def follow(self, accepted: Accepted) -> bool:
        """Take what a step emitted; True when a draft was judged by it."""
        if self._draft is None:
            return False
        for row, tokens in enumerate(accepted.tokens):
            self._texts[row] += tokens
            self._ended[row] |= not tokens or accepted.reasons[row] is not None
        depth = self._draft.max_depth
        long = [len(text) >= depth for text in self._texts]
        if not all(enough or ended for enough, ended in zip(long, self._ended)):
            return False
        rows = [row for row, enough in enumerate(long) if enough]
        if rows:
            self._judge(self._draft, rows, [self._texts[row][:depth] for row in rows])
        self._draft = None
        return bool(rows)

    def _judge(self, draft: DraftTree, rows: list[int], texts: list[list[int]]) -> None:
        device = draft.tokens.device
        index = torch.tensor(rows, device=device)
        truth = torch.tensor(texts, device=device)
        depths, valid = draft.depths[index], draft.valid[index]
        wrong = (draft.tokens[index] != truth.gather(1, (depths - 1).clamp(min=0))) | ~valid
        wrong[:, 0] = False
        right = ~(draft.ancestors[index] & wrong[:, None, :]).any(dim=2)
        keep = 1 - 1 / MEMORY
        self._right = keep * self._right + right[:, 1:].float().mean(dim=0)
        self._promised = keep * self._promised + self.promised(draft)[index].mean(dim=0)
        self._there = keep * self._there + valid[:, 1:].any(dim=0).float()
        self._watched = keep * self._watched + 1

    def promised(self, draft: DraftTree) -> Tensor:
        """How likely a draft says its nodes below the root are right: float32 [B, n].

        Without a word from the draft, the shares at first expected.
        """
        scores = self._shares if draft.scores is None else draft.scores[:, 1:]
        return scores * draft.valid[:, 1:]

    def ratios(self, sizes: Sequence[int]) -> list[float]:
        """Per size of a draft: right nodes for every one promised. Reads from the device."""
        ends = torch.tensor(sizes, device=self._right.device) - 1
        right = self._right + PRIOR * self._shares
        promised = self._promised + PRIOR * self._shares
        sums = torch.nn.functional.pad(torch.stack([right, promised]).cumsum(dim=1), (1, 0))
        found, said = sums[:, ends].clamp(min=1e-6)
        ratios: list[float] = (found / said).tolist()
        return ratios

    def expected(self, sizes: Sequence[int]) -> tuple[list[float], list[float]]:
        """Per size of a draft (the root included): its MAT, and how many of its nodes there are.

        Reads from the device.
        """
        weight = self._watched + PRIOR
        right = (self._right + PRIOR * self._shares) / weight
        there = (self._there + PRIOR) / weight
        ends = torch.tensor(sizes, device=right.device) - 1
        sums = torch.nn.functional.pad(torch.stack([right, there]).cumsum(dim=1), (1, 0))
        mats, nodes = (1 + sums[:, ends]).tolist()
        return mats, nodes

    def state(self) -> dict[str, Tensor]:
        """What was learnt, for ``restore``."""
        watched = torch.tensor([self._watched], dtype=torch.float32)
        counts = {"right": self._right, "promised": self._promised, "there": self._there}
        return {"watched": watched} | {name: count.cpu() for name, count in counts.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a ``state``."""
        self._right = state["right"].to(self._right.device)
        self._promised = state["promised"].to(self._right.device)
        self._there = state["there"].to(self._there.device)
        self._watched = float(state["watched"])
