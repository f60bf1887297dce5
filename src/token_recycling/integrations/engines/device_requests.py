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
from token_recycling.drafting.kernels.device.requests import follow, verified
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
    """

    def __init__(
        self,
        drafter: AdaptiveDrafter,
        context: Tensor,
        size: int,
        *,
        chain: bool,
        reach: int | None = None,
    ) -> None:
        """Allocate the states.

        Args:
            drafter: whose matrix is copied.
            context: int32 or int64 [S, w], the texts of all request slots, which the engine
                extends; on its device.
            size: most nodes of a draft, root included.
            chain: draft the most likely branch only.
            reach: how many tokens of a text are searched, from its end; None: all.
        """
        drafter.calibrate()
        self.k, self.vocab_size = drafter.matrix.k, drafter.matrix.vocab_size
        self.matrix = DeviceMatrix(drafter, context.device)
        self.matrix.load()
        grown = drafter.nodes + 1 if chain else size
        self._states = DeviceDrafter(
            drafter, self.matrix, context, grown, branch=size if chain else None, reach=reach
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

    def follow(
        self, states: Tensor, tokens: Tensor, choices: Tensor, firsts: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Accept what was drafted (see ``requests.follow``)."""
        return follow(states, self.draft, tokens, choices, firsts, longest)

    def forget(self) -> None:
        """Let all texts begin anew, since steps were not observed."""
        self._states.texts.lengths.fill_(-1)


def replace_drafts(draft: DraftTree, states: Tensor, packed: Tensor) -> None:
    """Set the tokens below the roots of ``states``; -1: invalid (see ``pack_drafts``)."""
    draft.valid[states, 1:] = packed >= 0
    draft.tokens[states, 1:] = torch.where(packed >= 0, packed, 0)


def pack_drafts(draft: DraftTree, states: Tensor) -> Tensor:
    """Return the tokens below the roots of ``states``, int64 [B, n - 1]; -1: invalid."""
    return torch.where(draft.valid[states, 1:], draft.tokens[states, 1:], -1)
