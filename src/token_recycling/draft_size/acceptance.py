"""Acceptance rates of all nodes of the drafts, including nodes that are not verified."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

EVERY = 4  # one draft in so many steps is watched
MEMORY = 50.0  # watched drafts after which the weight of an old one is 1/e
PRIOR = 4.0  # weight of the expected probabilities, in watched drafts


class AcceptanceRates:
    """Estimates acceptance rates by comparing whole drafts with the text that followed them.

    Nodes that were not verified are compared as well, so the estimate does not depend on the draft
    size.
    """

    def __init__(self, expected: tuple[float, ...], device: torch.device | str) -> None:
        """Start from ``expected``, an acceptance probability per node below the root."""
        self._expected = torch.tensor(expected, dtype=torch.float32, device=device)
        self._right = torch.zeros_like(self._expected)  # decayed counts
        self._promised = torch.zeros_like(self._expected)
        self._there = torch.zeros_like(self._expected)
        self._watched = 0.0
        self._draft: DraftTree | None = None
        self._begins: list[int] = []  # length of each row when the watched draft was proposed
        self._steps = 0

    def begin(self) -> None:
        """Drop the pending draft, as the texts change."""
        self._draft = None

    def watch(self, draft: DraftTree, sequences: list[Sequence]) -> None:
        """Take the whole draft of a step; remember one in ``EVERY`` if none is pending."""
        self._steps += 1
        if self._draft is None and self._steps >= EVERY:
            self._draft, self._steps = draft, 0
            self._begins = [len(sequence.tokens) for sequence in sequences]

    def judge(self, sequences: list[Sequence]) -> bool:
        """Compare the watched draft once enough text has followed; return True if compared."""
        if self._draft is None:
            return False
        depth = self._draft.max_depth
        ends = [begin + depth for begin in self._begins]
        long = [len(sequence.tokens) >= end for sequence, end in zip(sequences, ends)]
        if any(sequence.active and not done for sequence, done in zip(sequences, long)):
            return False
        index = [row for row, done in enumerate(long) if done]
        if index:
            texts = [sequences[row].tokens[self._begins[row] : ends[row]] for row in index]
            self._judge(self._draft, index, texts)
        self._draft = None
        return bool(index)

    def _judge(self, draft: DraftTree, rows: list[int], texts: list[list[int]]) -> None:
        device = draft.tokens.device
        index = torch.tensor(rows, device=device)
        truth = torch.tensor(texts, device=device)
        depths, valid = draft.depths[index], draft.valid[index]
        wrong = (draft.tokens[index] != truth.gather(1, (depths - 1).clamp(min=0))) | ~valid
        wrong[:, 0] = False
        right = ~(draft.ancestors[index] & wrong[:, None, :]).any(dim=2) & valid
        decay = 1 - 1 / MEMORY
        self._right = decay * self._right + right[:, 1:].float().mean(dim=0)
        self._promised = decay * self._promised + self.promised(draft)[index].mean(dim=0)
        self._there = decay * self._there + valid[:, 1:].any(dim=0).float()
        self._watched = decay * self._watched + 1

    def promised(self, draft: DraftTree) -> Tensor:
        """Return the probability of each node below the root by the draft: float32 [B, n - 1].

        These are the draft's scores or, if it has none, the expected probabilities; 0 for invalid
        nodes.
        """
        scores = self._expected if draft.scores is None else draft.scores[:, 1:]
        return scores * draft.valid[:, 1:]

    def ratios(self, sizes: list[int]) -> list[float]:
        """Return, per draft size, right nodes divided by promised ones; synchronizes."""
        ends = torch.tensor(sizes, device=self._right.device) - 1
        right = self._right + PRIOR * self._expected
        promised = self._promised + PRIOR * self._expected
        sums = torch.nn.functional.pad(torch.stack([right, promised]).cumsum(dim=1), (1, 0))
        found, said = sums[:, ends].clamp(min=1e-6)
        ratios: list[float] = (found / said).tolist()
        return ratios

    def expected(self, sizes: list[int]) -> tuple[list[float], list[float]]:
        """Return, per draft size, the expected MAT and the expected number of valid nodes.

        Sizes and numbers include the root. This synchronizes with the device.
        """
        weight = self._watched + PRIOR
        right = (self._right + PRIOR * self._expected) / weight
        there = (self._there + PRIOR) / weight
        ends = torch.tensor(sizes, device=right.device) - 1
        sums = torch.nn.functional.pad(torch.stack([right, there]).cumsum(dim=1), (1, 0))
        mats, nodes = (1 + sums[:, ends]).tolist()
        return mats, nodes

    def state(self) -> dict[str, Tensor]:
        """Return the learnt counts on the CPU, for ``restore``."""
        watched = torch.tensor([self._watched], dtype=torch.float32)
        counts = {"right": self._right, "promised": self._promised, "there": self._there}
        return {"watched": watched} | {name: count.cpu() for name, count in counts.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state``."""
        self._right = state["right"].to(self._right.device)
        self._promised = state["promised"].to(self._right.device)
        self._there = state["there"].to(self._there.device)
        self._watched = float(state["watched"])
