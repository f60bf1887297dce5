"""Drafting for requests that are on a GPU: nothing is copied to the host.

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.device import DeviceDrafter, DeviceMatrix
from token_recycling.drafting.kernels.device.requests import verified
from token_recycling.drafting.kernels.device.state import DeviceDraft
from token_recycling.drafting.kernels.device.top_k import device_top_k


class DeviceRequests(DeviceDrafter):
    """One drafter for all requests of an engine, any of which take part in a step.

    The counterpart of ``RequestDrafter`` on a GPU: every request slot has a state there, and a step
    launches the same few kernels for any number of requests. A request whose state is not that of
    its text begins anew, so that slots may be used again without notice.

    Attributes:
        matrix: of all requests.
        branches: bool [S], slots whose draft is the most likely branch of its tree, a chain.
    """

    branches: Tensor

    def __init__(
        self,
        drafter: AdaptiveDrafter,
        context: Tensor,
        size: int,
        *,
        chains: bool = False,
        reach: int | None = None,
    ) -> None:
        """Allocate the states.

        Args:
            drafter: whose matrix is copied.
            context: int32 or int64 [S, w], the texts of all request slots, which the engine
                extends; on its device.
            size: nodes of a tree, root included.
            chains: draft only the most likely branches, from the beginning.
            reach: how many tokens of a text are searched, from its end; None: all.
        """
        drafter.calibrate()
        self.k, self.vocab_size = drafter.matrix.k, drafter.matrix.vocab_size
        matrix = DeviceMatrix(drafter, context.device)
        matrix.load()
        branches = torch.full((len(context),), chains, device=context.device)
        super().__init__(drafter, matrix, context, size, branches=branches, reach=reach)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is learnt from logits [m, V]: the k best, and their tokens, [m, k]."""
        return device_top_k(logits[:, : self.vocab_size], self.k)

    def learn(
        self,
        states: Tensor,
        totals: Tensor,
        prompts: Tensor,
        sampled: Tensor,
        firsts: Tensor,
        best: tuple[Tensor, Tensor],
    ) -> None:
        """Learn from a step, whose tokens are in the texts.

        Args:
            states: int64 [B], the request slot of each row of the batch.
            totals: int32 [S], tokens of the request in each slot, with those of this step.
            prompts: int32 [S], of these, the ones that it began or was resumed with.
            sampled: int32 [B], tokens that came in this step; 0: in the middle of a prompt.
            firsts: int32 [B + 1], index of each row's root in the logits, and their number.
            best: see the method ``best``, of the step's logits.
        """
        sizes = self.matrix.sizes
        valid, accepted = verified(
            states, self.state, self.draft, totals, prompts, sampled, firsts, sizes
        )
        self.observe(states, firsts, valid, *best, accepted)

    def forget(self) -> None:
        """Let all texts begin anew, since steps were not observed."""
        self.state.lengths.fill_(-1)


def replace_drafts(draft: DeviceDraft, states: Tensor, packed: Tensor) -> None:
    """Set what is below the roots of ``states`` (see ``pack_drafts``)."""
    tokens, draft.parents[states, 1:], draft.depths[states, 1:] = packed.unbind(1)
    draft.valid[states, 1:] = tokens >= 0
    draft.tokens[states, 1:] = tokens.clamp(min=0)


def pack_drafts(draft: DeviceDraft, states: Tensor) -> Tensor:
    """Return tokens (-1: invalid), parents and depths below the roots, int64 [B, 3, n - 1]."""
    tokens = torch.where(draft.valid, draft.tokens, -1)
    return torch.stack([tokens, draft.parents, draft.depths], 1)[states, :, 1:]
