"""Drafting for serving engines whose requests are on a GPU: nothing is copied to the host.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.device import DeviceDrafter, DeviceMatrix
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.requests import Followed, follow, place, verified
from token_recycling.drafting.kernels.device.top_k import device_top_k


class DeviceBatch(NamedTuple):
    """A step of an engine, on its device.

    Attributes:
        states: int64 [B], the request slot of each row of the batch.
        totals: int32 [S], tokens of the request in each slot, with those that came in this step.
        prompts: int32 [S], of these, the ones that it began or was resumed with.
        sampled: int32 [B], tokens that came in this step; 0: in the middle of a prompt.
        firsts: int32 [B + 1], index of each row's root in the logits, and the number of these.
    """

    states: Tensor
    totals: Tensor
    prompts: Tensor
    sampled: Tensor
    firsts: Tensor


class DeviceRequests:
    """One drafter for all requests of an engine, any of which take part in a step.

    The counterpart of ``RequestDrafter`` on a GPU: every request slot has a state there, and a step
    launches the same few kernels for any number of requests. A request whose state is not that of
    its text begins anew, so that slots may be used again without notice.

    Attributes:
        matrix: of all requests.
        branches: bool [S], slots whose draft is the most likely branch of its tree, a chain.
    """

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
        self.matrix = DeviceMatrix(drafter, context.device)
        self.matrix.load()
        self.branches = torch.full((len(context),), chains, device=context.device)
        self._states = DeviceDrafter(
            drafter, self.matrix, context, size, branches=self.branches, reach=reach
        )

    @property
    def draft(self) -> DraftTree:
        """The last draft of every request slot, [S, n]."""
        return self._states.draft

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is learnt from logits [m, V]: the k best, and their tokens, [m, k]."""
        return device_top_k(logits[:, : self.vocab_size], self.k)

    def observe(self, batch: DeviceBatch, best: tuple[Tensor, Tensor]) -> None:
        """Learn from a step, whose tokens are in the texts, by the ``best`` of its logits."""
        states = self._states
        valid, accepted = verified(
            batch.states,
            states.texts,
            states.roots,
            states.draft,
            states.slots,
            states.slot_keys,
            batch.totals,
            batch.prompts,
            batch.sampled,
            batch.firsts,
            self.matrix.tables.sizes,
        )
        states.observe(batch.states, batch.firsts, valid, *best, accepted)

    def propose(self, states: Tensor, roots: Tensor) -> None:
        """Draft for requests that were observed.

        Args:
            states: int64 [B], their slots.
            roots: int64 [S], the last token of every slot.
        """
        self._states.propose(states, roots)

    def place(
        self,
        states: Tensor,
        starts: Tensor,
        firsts: Tensor,
        positions: Tensor,
        paths: Tensor,
        depths: Tensor,
    ) -> None:
        """Place the nodes of the drafts that a step verifies (see ``requests.place``)."""
        place(states, self.draft, starts, firsts, positions, paths, depths)

    def follow(
        self,
        states: Tensor,
        tokens: Tensor,
        choices: Tensor,
        positions: Tensor,
        prompts: Tensor,
        firsts: Tensor,
        longest: int,
    ) -> Followed:
        """Accept what was drafted (see ``requests.follow``)."""
        return follow(
            *(states, self.branches, self.draft, tokens, choices),
            *(positions, prompts, firsts, longest),
        )

    def forget(self) -> None:
        """Let all texts begin anew, since steps were not observed."""
        self._states.texts.lengths.fill_(-1)


def replace_drafts(draft: DraftTree, states: Tensor, packed: Tensor) -> None:
    """Set what is below the roots of ``states`` (see ``pack_drafts``)."""
    tokens, draft.parents[states, 1:], draft.depths[states, 1:] = packed.unbind(1)
    draft.valid[states, 1:] = tokens >= 0
    draft.tokens[states, 1:] = tokens.clamp(min=0)


def pack_drafts(draft: DraftTree, states: Tensor) -> Tensor:
    """Return tokens (-1: invalid), parents and depths below the roots, int64 [B, 3, n - 1]."""
    tokens = torch.where(draft.valid, draft.tokens, -1)
    return torch.stack([tokens, draft.parents, draft.depths], 1)[states, :, 1:]
