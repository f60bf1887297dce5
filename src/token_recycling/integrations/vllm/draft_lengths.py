"""How many tokens to draft for each request of a step, by what drafts have brought and cost."""

from __future__ import annotations

from time import perf_counter

from token_recycling.drafting.adaptive import expected_acceptance
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.integrations.vllm.options import VllmOptions

# Probability that a chain's next token is right, if the one before was: assumed before the first
# step. Measured on an H200: 1.6 tokens per step of 6 drafted tokens.
RIGHT = 0.4


class DraftLengths:
    """How many tokens to draft per request, in place of vLLM's table by numbers of requests."""

    def __init__(self, table: list[int], options: VllmOptions, device_type: str) -> None:
        """Choose among the lengths of ``table``, which vLLM has captured graphs for.

        Args:
            table: vLLM's, tokens to draft by number of requests.
            options: ours; unless the mode is "chain", drafts are trees.
            device_type: whose step costs are assumed before the first ones were measured.
        """
        self._options = options
        self.lengths = tuple(sorted(set(table) - {0}))
        most = max(self.lengths, default=1)
        costs = CostCurve.assumed(device_type)
        if options.mode != "chain":
            self.draft_size = AutoSize(expected_acceptance(most), costs)
        else:  # of a chain, little is learnt from what is rejected
            acceptance = tuple(RIGHT**depth for depth in range(1, most + 1))
            self.draft_size = AutoSize(acceptance, costs, learning=0.0)
        self._ended = 0.0  # when the last step did
        self._last: dict[str, int] | None = None  # what it verified; None: a prompt was read

    def __getitem__(self, requests: int) -> int:
        """Return the tokens to draft for each of so many requests."""
        most = self._options.size_for(requests, max(self.lengths, default=0) + 1)
        sizes = tuple(length + 1 for length in self.lengths if length < most)
        if not sizes:
            return 0
        self.draft_size.begin(requests)
        return self.draft_size.typical(sizes=sizes) - 1 if self.draft_size.pays else 0

    def record(self, drafted: dict[str, int], emitted: list[int], prompts: bool) -> None:
        """Learn from a step that has ended.

        The time since the one before counts as that of the step if both were of the same requests
        and lengths, and no prompt was read.

        Args:
            drafted: tokens that were verified for each request that got a token.
            emitted: tokens that each of them got.
            prompts: whether a prompt was read.
        """
        before, self._ended = self._ended, perf_counter()
        same = not prompts and self._last == drafted
        self._last = None if prompts else drafted
        if not drafted:
            return
        self.draft_size.begin(len(drafted))
        self.draft_size.record(
            len(drafted),
            sum(drafted.values()),
            sum(emitted) / len(emitted),
            self._ended - before if same else None,
        )
