"""vLLM's scheduler, drafting as many tokens as pay.

The number of tokens to draft is one for all requests of a step, since vLLM has captured graphs for
such steps only. vLLM looks it up by the number of requests
(``num_speculative_tokens_per_batch_size``); here, a policy answers. What it knows is what the
scheduler is told anyway, when a step has ended: which tokens came, and when.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from token_recycling.integrations.vllm.draft_lengths import DraftLengths
from token_recycling.integrations.vllm.options import VllmOptions, options_of


class _Paced:
    """Part of a scheduler: its lengths of drafts are a policy, which learns from every step."""

    dynamic_sd_lookup: Any
    vllm_config: Any

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Learn from a step, and go on as vLLM does."""
        lengths = self.dynamic_sd_lookup
        if isinstance(lengths, list):
            device = self.vllm_config.device_config.device
            options = options_of(self.vllm_config) or VllmOptions()
            lengths = DraftLengths(lengths, options, getattr(device, "type", "cpu"))
            self.dynamic_sd_lookup = lengths
        if lengths is not None and model_runner_output.sampled_token_ids:
            self._record(lengths, scheduler_output, model_runner_output)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    @staticmethod
    def _record(lengths: DraftLengths, scheduled: Any, output: Any) -> None:
        drafts = scheduled.scheduled_spec_decode_tokens
        rows = output.req_id_to_index
        drafted, emitted, prompts = {}, [], False
        for request, tokens in scheduled.num_scheduled_tokens.items():
            verified = len(drafts.get(request, ()))
            prompts = prompts or tokens > verified + 1
            came = len(output.sampled_token_ids[rows[request]])
            if came:
                drafted[request] = verified
                emitted.append(came)
        lengths.record(drafted, emitted, prompts)


def recycling_scheduler(*args: Any, vllm_config: Any, **options: Any) -> Any:
    """Return a scheduler for a configuration of vLLM (``scheduler_cls``)."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    kind: Any = type(f"Paced{base.__name__}", (_Paced, base), {})
    return kind(*args, vllm_config=vllm_config, **options)
