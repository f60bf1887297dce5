"""Acceptance on a GPU: every token is the one that vLLM would draw without drafts.

vLLM's rejection sampling keeps the distribution of texts, but a seed gives another text than
without drafts. Its sampler draws with noise that depends on seed and position alone. So it draws a
token after every node, and the path along these tokens is accepted: the text of plain decoding. A
chain is a tree whose nodes have one child each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from token_recycling.drafting.kernels.device.requests import Followed, follow
from token_recycling.integrations.vllm.device_requests import DeviceRequests
from token_recycling.integrations.vllm.device_trees import DeviceTrees


class ExactSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's rejection sampler, whose acceptance is replaced."""

    def __init__(
        self, standard: RejectionSampler, requests: DeviceRequests, trees: DeviceTrees | None
    ) -> None:
        """Take the place of ``standard``, for drafts of ``requests``, which may be trees."""
        self.__dict__.update(vars(standard))
        self._requests, self._trees = requests, trees
        self._followed: list[Followed] = []  # parts of the step

    def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **options: Any) -> Any:
        """Sample and accept (see the base class), and move keys and values of what is accepted."""
        self._followed = []
        output = super().__call__(logits, input_batch, *args, **options)
        if self._trees is not None:
            parts = self._followed
            counts, sources = parts[0].counts, parts[0].sources
            if len(parts) > 1:
                begins = [sum(len(part.sources) for part in parts[:i]) for i in range(len(parts))]
                counts = torch.cat([part.counts for part in parts])
                sources = torch.cat([part.sources + at for part, at in zip(parts, begins)])
            self._trees.commit(input_batch, counts, sources)
        return output

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
        followed = follow(
            *(idx_mapping, self._requests.branches, self._requests.draft),
            *(verify_draft_sampled, drawn.view(-1), pos),
            *(self.sampler.req_states.prefill_len.gpu, cu_num_logits),
            self.num_speculative_steps + 1,
        )
        self._followed.append(followed)
        if self._trees is not None and self._wants_logits(idx_mapping_np):
            # vLLM takes those of the first rows of a request, one for each token.
            along = logits[followed.sources]
            same = processed.data_ptr() == logits.data_ptr()
            processed = along if same else processed[followed.sources]
            logits.copy_(along)
        return processed, followed.emitted, followed.counts

    def _wants_logits(self, requests: Any) -> bool:
        """Return whether the logits of a step are read after the tokens are drawn."""
        wanted = self.sampler.sampling_states.max_num_logprobs(requests) != NO_LOGPROBS
        return wanted or bool(self.sampler.return_sampling_mask)


def takes_place_of(sampler: Any) -> bool:
    """Return whether ``ExactSampler`` does what this rejection sampler is asked to do."""
    return (
        type(sampler) is RejectionSampler
        and sampler.watermark_key is None
        and sampler.synthetic_conditional_rates is None
        and not sampler.use_block_verification
        and sampler.sampler.trace_replay_state is None
    )
