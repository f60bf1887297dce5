"""Where Token Recycling looks into vLLM's model runner.

Three methods are wrapped. Each does what it did before, unless the runner's drafter is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from token_recycling.integrations.engines.versions import check_signature
from token_recycling.integrations.vllm import tree_step
from token_recycling.integrations.vllm.step import VerifiedStep

if TYPE_CHECKING:
    from token_recycling.integrations.vllm.proposer import Proposer

NO_LIMIT = 1 << 30
# The methods, and the parameters that they must have.
SAMPLE_TOKENS = ("sample_tokens", "self", "grammar_output")
PREPARE_INPUTS = ("_prepare_inputs", "self", "scheduler_output", "num_scheduled_tokens")
SAMPLE = ("_sample", "self", "logits", "spec_decode_metadata")


def install(proposer: type[Proposer], *, tree: bool) -> None:
    """Wrap the methods, once in a process.

    Args:
        proposer: the class of drafters that are ours.
        tree: for ``mode=tree`` too.

    Raises:
        EngineVersionError: vLLM has changed one of them.
    """
    _wrap(partial(_catching_logits, proposer), *SAMPLE_TOKENS)
    _wrap(partial(_sampling, proposer), *SAMPLE)
    if tree:
        _wrap(partial(_positioning_trees, proposer), *PREPARE_INPUTS)


def _wrap(around: Callable[..., Any], name: str, *parameters: str) -> None:
    method = getattr(GPUModelRunner, name)
    if getattr(method, "token_recycling", False):
        return
    check_signature(method, *parameters)
    wrapped = wraps(method)(around(method))
    wrapped.token_recycling = True  # type: ignore[attr-defined]
    setattr(GPUModelRunner, name, wrapped)


def _ours(kind: type[Proposer], runner: Any) -> Proposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, kind) else None


def _catching_logits(kind: type[Proposer], method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the logits of every verified row for the drafter."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        proposer, state = _ours(kind, self), self.execute_model_state
        if proposer is not None and state is not None:
            # vLLM drafts for nobody once one request comes near the limit; ours has none.
            self.effective_drafter_max_model_len = NO_LIMIT
            if state.spec_decode_metadata is not None and state.logits is not None:
                # A grammar's mask is put into the logits in place.
                logits = state.logits if grammar_output is None else state.logits.clone()
                step = VerifiedStep(self, logits, state.spec_decode_metadata)
                with proposer.learning_from(step):
                    return method(self, grammar_output)
        return method(self, grammar_output)

    return sample_tokens


def _positioning_trees(kind: type[Proposer], method: Callable[..., Any]) -> Callable[..., Any]:
    """Give the nodes of trees the positions of their depths, and the attention its masks."""

    def prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        found = method(self, scheduler_output, num_scheduled_tokens)
        proposer = _ours(kind, self)
        if proposer is not None and proposer.tree:
            tree_step.place(self, proposer, found[1])
        return found

    return prepare_inputs


def _sampling(kind: type[Proposer], method: Callable[..., Any]) -> Callable[..., Any]:
    """Hand each tree's best path to vLLM's own sampler, as the chain that it verifies.

    A batch without drafts is sampled as without speculation: on CPUs vLLM's rejection sampler
    fails where there is nothing to verify and a request has a top-k.
    """

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        proposer = _ours(kind, self)
        if proposer is None or spec_decode_metadata is None:
            return method(self, logits, spec_decode_metadata)
        if not any(spec_decode_metadata.num_draft_tokens):
            return method(self, logits, None)
        if not proposer.tree:
            return method(self, logits, spec_decode_metadata)
        with tree_step.walked(self, proposer, logits, spec_decode_metadata) as chain:
            return method(self, *chain)

    return sample
