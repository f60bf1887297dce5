"""Hooks into vLLM's model runner.

Three methods are wrapped. They behave as before unless the runner's drafter is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from token_recycling.integrations.engines.versions import check_signature
from token_recycling.integrations.vllm import greedy, sampled, tree_step
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep

NO_LIMIT = 1 << 30
# The wrapped methods and their expected parameters.
SAMPLE_TOKENS = ("sample_tokens", "self", "grammar_output")
PREPARE_INPUTS = ("_prepare_inputs", "self", "scheduler_output", "num_scheduled_tokens")
SAMPLE = ("_sample", "self", "logits", "spec_decode_metadata")


def install(proposer: type[Any]) -> None:
    """Wrap the methods, once per process.

    Args:
        proposer: the class of our drafters.

    Raises:
        EngineVersionError: the signature of a method has changed.
    """
    _wrap(partial(_catching_logits, proposer), *SAMPLE_TOKENS)
    _wrap(partial(_sampling, proposer), *SAMPLE)
    _wrap(partial(_preparing, proposer), *PREPARE_INPUTS)


def _wrap(around: Callable[..., Any], name: str, *parameters: str) -> None:
    method = getattr(GPUModelRunner, name)
    if getattr(method, "token_recycling", False):
        return
    check_signature(method, *parameters)
    wrapped = wraps(method)(around(method))
    wrapped.token_recycling = True  # type: ignore[attr-defined]
    setattr(GPUModelRunner, name, wrapped)


def _ours(kind: type[Any], runner: Any) -> StepDrafter | None:
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, kind):
        return None
    ours: StepDrafter = drafter
    return ours


def _catching_logits(kind: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``sample_tokens`` to keep the logits of verified rows for the drafter."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        proposer, state = _ours(kind, self), self.execute_model_state
        if proposer is not None and state is not None:
            # vLLM stops all drafting when one request is near the limit; ours has none.
            self.effective_drafter_max_model_len = NO_LIMIT
            if state.logits is not None:
                # A grammar's mask is applied to the logits in place.
                constrained = grammar_output is not None
                logits = state.logits.clone() if constrained else state.logits
                scheduled = state.scheduler_output.total_num_scheduled_tokens
                metadata = state.spec_decode_metadata
                step = VerifiedStep(self, logits, metadata, scheduled, constrained)
                with proposer.learning_from(step):
                    return method(self, grammar_output)
        return method(self, grammar_output)

    return sample_tokens


def _preparing(kind: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_prepare_inputs`` to set the positions and attention masks of trees.

    Steps without any draft are prepared as without speculation, which is faster, where that was
    tested: on CPUs, for models without recurrent layers.
    """

    def prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        proposer = _ours(kind, self)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        config = self.speculative_config
        if proposer is not None and not drafts and proposer.on_cpu and not proposer.recurrent:
            self.speculative_config = None
        try:
            prepared = method(self, scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = config
        if proposer is not None and proposer.tree:
            tree_step.place(self, proposer, prepared[1])
        return prepared

    return prepare_inputs


def _sampling(kind: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_sample`` to pass each tree's best path to vLLM's own sampler as a chain.

    On CPUs vLLM's rejection sampler is wrong for sampled requests, fails if there is nothing to
    verify and a request sets top-k, and copies all logits twice. There, batches without drafts are
    sampled without speculation, batches with sampled drafts token by token (see ``sampled``), and
    greedy chains take what the drafter needs anyway (see ``greedy``).
    """

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        proposer = _ours(kind, self)
        if proposer is None or spec_decode_metadata is None:
            return method(self, logits, spec_decode_metadata)
        if not any(spec_decode_metadata.num_draft_tokens):
            return method(self, logits, None)
        if proposer.on_cpu and sampled.any_drafted(self, spec_decode_metadata):
            return sampled.sample(self, proposer, logits, spec_decode_metadata)
        step = proposer.step
        if proposer.on_cpu and not proposer.tree and step is not None and step.takes_best:
            return greedy.sample(proposer, step, spec_decode_metadata)
        if not proposer.tree:
            return method(self, logits, spec_decode_metadata)
        with tree_step.as_chains(self, proposer, logits, spec_decode_metadata) as chain:
            return method(self, *chain)

    return sample
