"""Hooks into vLLM's model runner.

Four functions are wrapped. They behave as before unless the runner's drafter is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from token_recycling.integrations.vllm import tree_attention
from token_recycling.integrations.vllm.accept import accept
from token_recycling.integrations.vllm.options import options_of
from token_recycling.integrations.vllm.plugin import wrap
from token_recycling.integrations.vllm.step import BUILT_IN, StepDrafter, VerifiedStep

NO_LIMIT = 1 << 30
# The wrapped functions and their expected parameters.
SAMPLE_TOKENS = ("sample_tokens", "self", "grammar_output")
PREPARE_INPUTS = ("_prepare_inputs", "self", "scheduler_output", "num_scheduled_tokens")
SAMPLE = ("_sample", "self", "logits", "spec_decode_metadata")
BUILD_PROCESSORS = (
    *("build_logitsprocs", "vllm_config", "device"),
    *("is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
)


def install() -> None:
    """Wrap the methods, once per process.

    Raises:
        EngineVersionError: the signature of a method has changed.
    """
    wrap(GPUModelRunner, _catching_logits, *SAMPLE_TOKENS)
    wrap(GPUModelRunner, _sampling, *SAMPLE)
    wrap(GPUModelRunner, _preparing, *PREPARE_INPUTS)
    wrap(gpu_model_runner, _processing, *BUILD_PROCESSORS)


def _ours(runner: Any) -> StepDrafter | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, StepDrafter) else None


def _catching_logits(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``sample_tokens`` to keep the logits of verified rows for the drafter."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        proposer, state = _ours(self), self.execute_model_state
        if proposer is not None and state is not None:
            # vLLM stops all drafting when one request is near the limit; ours has none.
            self.effective_drafter_max_model_len = NO_LIMIT
            if state.logits is not None:
                # A grammar's mask is applied to the logits in place.
                constrained = grammar_output is not None
                logits = state.logits.clone() if constrained else state.logits
                scheduled = state.scheduler_output.total_num_scheduled_tokens
                metadata = state.spec_decode_metadata
                # vLLM calls ``propose`` inside, without the logits.
                proposer.step = VerifiedStep(self, logits, metadata, scheduled, constrained)
                try:
                    return method(self, grammar_output)
                finally:
                    proposer.step = None
        return method(self, grammar_output)

    return sample_tokens


def _preparing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_prepare_inputs`` to set the positions and attention masks of trees.

    Steps without any draft are prepared as without speculation, which is faster, where that was
    tested: for models without recurrent layers.
    """

    def prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        proposer = _ours(self)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        config = self.speculative_config
        if proposer is not None and not drafts and not proposer.recurrent:
            self.speculative_config = None
        try:
            prepared = method(self, scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = config
        if proposer is not None and proposer.tree:
            tree_attention.place(self, proposer, prepared[1])
        return prepared

    return prepare_inputs


def _sampling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_sample`` to accept drafts on CPUs (see ``accept``).

    There vLLM's rejection sampler is wrong as soon as one request of the batch is sampled, and
    fails if one of these sets top-k. Batches without drafts are sampled without speculation.
    """

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        proposer = _ours(self)
        if proposer is None or spec_decode_metadata is None:
            return method(self, logits, spec_decode_metadata)
        if not any(spec_decode_metadata.num_draft_tokens):
            return method(self, logits, None)
        if proposer.step is None:
            return method(self, logits, spec_decode_metadata)
        return accept(self, proposer, proposer.step, logits, spec_decode_metadata)

    return sample


def _processing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_logitsprocs`` to serve ``min_p`` and ``logit_bias`` beside our drafts.

    vLLM leaves these out under speculation, because its rejection sampler cannot apply them.
    """

    def build(
        vllm_config: Any,
        device: Any,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Any = (),
    ) -> Any:
        if custom_logitsprocs or options_of(vllm_config) is None:
            return method(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(
            processor(vllm_config, device, is_pin_memory) for processor in BUILT_IN
        )

    return build
