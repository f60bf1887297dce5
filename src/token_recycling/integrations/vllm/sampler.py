"""Acceptance on a GPU: every token is the one that vLLM would draw without drafts.

vLLM's rejection sampling keeps the distribution of texts, but a seed gives another text than
without drafts. Its sampler draws with noise that depends on seed and position alone. So it draws a
token after every node, and the path along these tokens is accepted: the text of plain decoding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from token_recycling.integrations.engines.device_requests import DeviceRequests


class ExactSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's rejection sampler, whose acceptance is replaced."""

    def __init__(self, standard: RejectionSampler, requests: DeviceRequests) -> None:
        """Take the place of ``standard``, for drafts of ``requests``."""
        self.__dict__.update(vars(standard))
        self._requests = requests

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits as sampled from, tokens [B, n], and their numbers (see the base class)."""
        drawn, processed = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            # The logits are returned for log probabilities, after top-k and top-p.
            return_logprobs=True,
        )
        emitted, counts = self._requests.follow(
            idx_mapping,
            verify_draft_sampled,
            drawn.view(-1),
            cu_num_logits,
            self.num_speculative_steps + 1,
        )
        return processed, emitted, counts


def takes_place_of(sampler: Any) -> bool:
    """Return whether ``ExactSampler`` does what this rejection sampler is asked to do."""
    return (
        type(sampler) is RejectionSampler
        and sampler.watermark_key is None
        and sampler.synthetic_conditional_rates is None
        and not sampler.use_block_verification
        and sampler.sampler.trace_replay_state is None
    )
