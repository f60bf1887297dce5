"""Drafts on the device, for vLLM's Model Runner V2."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.kernels.device.requests import follow
from token_recycling.errors import TokenRecyclingError
from token_recycling.graph.drafting import DEVICE_NODES
from token_recycling.integrations.engines.versions import VLLM, check_version, refuse
from token_recycling.integrations.vllm.device_requests import (
    DeviceRequests,
    pack_drafts,
    replace_drafts,
)
from token_recycling.integrations.vllm.device_trees import DeviceTrees, why_chains
from token_recycling.integrations.vllm.options import CHAIN_FROM, VllmOptions, tokenizer_of
from token_recycling.integrations.vllm.sampler import ExactSampler, takes_place_of

logger = logging.getLogger(__name__)
WARM_UP = ("_warmup", "_v2_mixed_warmup")  # beginnings of the requests that vLLM makes at first


def check_model(vllm_config: Any, options: VllmOptions) -> None:
    """Check that drafts are possible with this model and these settings.

    Raises:
        TokenRecyclingError: they are not; the message says why.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    drafted = vllm_config.speculative_config.num_speculative_tokens
    reasons = {
        f"the drafter {options.drafter} runs only on CPUs": options.drafter != "adaptive",
        f"num_speculative_tokens is {drafted}; at most {DEVICE_NODES - 1} can be drafted": (
            drafted >= DEVICE_NODES
        ),
        "the model has layers with recurrent state": model.is_hybrid or model.is_attention_free,
        "pipeline parallelism is on": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism is on": parallel.prefill_context_parallel_size > 1,
        "batch-sharded sampling is on": bool(parallel.enable_batch_sharded_sampling),
    }
    refuse("Token Recycling cannot draft on a GPU: {}", reasons)


class Speculator(BaseSpeculator):  # type: ignore[misc]
    """Drafts for all requests of a model runner, and learns from the logits of its steps.

    Texts, drafts and the matrix are on the device, and nothing waits for it: the engine schedules
    ahead.

    Attributes:
        draft_logits: None, since drafts are not sampled.
        trees: verifies the drafts of a model that can; None: all drafts are chains.
    """

    supports_mm_inputs = False
    draft_logits: Tensor | None = None

    def __init__(self, vllm_config: Any, requests: Any, options: VllmOptions) -> None:
        """Allocate the states of all request slots.

        Args:
            vllm_config: vLLM's configuration.
            requests: vLLM's ``RequestState``.
            options: ours.

        Raises:
            TokenRecyclingError: the version, model or an option is not supported.
        """
        check_version(VLLM)
        check_model(vllm_config, options)
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.most: int = speculative.num_speculative_tokens
        grown = min(max(CHAIN_FROM, self.most), DEVICE_NODES - 1)
        drafter = options.make(model.get_vocab_size(), grown, partial(tokenizer_of, model))
        assert isinstance(drafter, AdaptiveDrafter)  # see ``check_model``
        self._of_runner, self._dtype = requests, model.dtype
        self._config, self._options = vllm_config, options
        self.requests = DeviceRequests(
            drafter,
            requests.all_token_ids.gpu,
            grown + 1,
            chains=True,
            reach=options.context,
        )
        self.trees: DeviceTrees | None = None
        self._branches = np.ones(len(requests.all_token_ids.gpu), dtype=bool)  # of ``requests``
        parallel = vllm_config.parallel_config
        self._parallel = parallel.tensor_parallel_size > 1
        first = parallel.rank == 0 and parallel.data_parallel_rank == 0
        self._keeper = options.keeper(drafter, self.requests.matrix) if first else None
        self._learns = False  # whether the next logits are kept
        self._best: tuple[Tensor, Tensor] | None = None
        self._follows = False  # whether the states are those of the last step
        self._warming = True  # whether no request has been served yet
        # vLLM's admission of drafts by their confidence, if it is switched on
        self.enable_adaptive_verification: bool = speculative.enable_adaptive_verification
        self.draft_token_confidence_probs = torch.zeros(
            (len(requests.all_token_ids.gpu), self.most),
            dtype=torch.float32,
            device=requests.all_token_ids.gpu.device,
        )

    def attach(self, runner: Any) -> None:
        """Read the logits of a runner whose model is loaded, and accept drafts in it."""
        compute_logits = runner.model.compute_logits

        def computed(*args: Any, **options: Any) -> Any:
            logits = compute_logits(*args, **options)
            if self._learns:  # before a grammar or a penalty changes them
                self._learns = False
                self._best = self.requests.best(logits)
            return logits

        runner.model.compute_logits = computed
        exact = takes_place_of(runner.rejection_sampler)
        if self._options.mode != "chain":
            reason = why_chains(self._config, runner)
            if reason is None and not exact:
                reason = "vLLM's own acceptance is asked for"
            if reason is None:
                self.trees = DeviceTrees(self._config, runner, self.requests)
            elif self._options.mode == "tree":
                raise TokenRecyclingError(
                    f"mode=tree cannot be used with this model: {reason}; use mode=chain"
                )
            else:
                logger.warning(
                    "Token Recycling drafts chains, not trees, with this model: %s; "
                    "num_speculative_tokens 6 is enough for chains",
                    reason,
                )
        if exact:
            runner.rejection_sampler = ExactSampler(
                runner.rejection_sampler, self.requests, self.trees
            )

    def add(self, requests: list[Any], slots: dict[str, int]) -> None:
        """Note which of some new requests draft only chains.

        Args:
            requests: vLLM's ``NewRequestData``.
            slots: of all requests, by their names.
        """
        before = self._branches.copy()
        for request in requests:
            chain = self.trees is None or needs_chain(request.sampling_params)
            self._branches[slots[request.req_id]] = chain
        if (before != self._branches).any():
            async_tensor_h2d(self._branches.copy(), out=self.requests.branches)

    def begin_step(self, drafted: int) -> None:
        """Note that tokens are about to be sampled; the next step verifies ``drafted`` tokens."""
        self._learns, self._best = drafted > 0, None
        if self.trees is not None:
            self.trees.end()

    @torch.inference_mode()
    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Compile all kernels before the first request, by a step in which nothing came."""
        runner, requests = self._of_runner, self.requests
        device = runner.all_token_ids.gpu.device
        states = torch.zeros(1, dtype=torch.long, device=device)
        firsts = torch.arange(2, dtype=torch.int32, device=device)
        sampled = torch.zeros(1, dtype=torch.int32, device=device)
        logits = torch.zeros((1, requests.vocab_size), dtype=self._dtype, device=device)
        prompts = runner.prefill_len.gpu
        best = requests.best(logits)
        requests.learn(states, runner.total_len.gpu, prompts, sampled, firsts, best)
        requests.propose(states, runner.last_sampled_tokens.view(-1))
        follow(
            *(states, requests.branches, requests.draft, states, states),
            *(states, prompts, firsts, self.most + 1),
        )
        requests.forget()

    def capture(self) -> None:
        """Do nothing: the kernels are launched one by one, ahead of the device."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Learn from a step and draft for the next (see ``BaseSpeculator``).

        Returns:
            Draft tokens of each row, int64 [B, K].
        """
        states = input_batch.idx_mapping[: input_batch.num_reqs]
        best, self._best = self._best, None
        if dummy_run or best is None:
            if self._follows and not dummy_run:
                self._follows = False
                self.requests.forget()
            nothing: Tensor = states.new_zeros((len(states), self.most))
            return nothing
        if self._warming and not input_batch.req_ids[0].startswith(WARM_UP):
            # The first request: what vLLM's own steps have taught is nobody's text.
            self._warming = False
            self.requests.matrix.load()
            self.requests.forget()
        requests = self._of_runner
        self.requests.learn(
            *(states, requests.total_len.gpu, requests.prefill_len.gpu),
            num_sampled[: len(states)],
            input_batch.cu_num_logits[: len(states) + 1],
            best,
        )
        self.requests.propose(states, last_sampled.view(-1))
        self._follows = True
        if self._keeper is not None:
            self._keeper.tick()
        return self._drafts(states)

    def _drafts(self, states: Tensor) -> Tensor:
        """Return the draft tokens of ``states``, the same on all ranks."""
        draft = self.requests.draft
        if self._parallel:
            packed = get_tp_group().broadcast(pack_drafts(draft, states), src=0)
            replace_drafts(draft, states, packed)
        if self.enable_adaptive_verification:
            assert draft.scores is not None
            chances = draft.scores[states]
            given = chances[:, 1 : self.most + 1] / chances[:, : self.most].clamp(min=1e-9)
            self.draft_token_confidence_probs[: len(states)] = given
        return draft.tokens[states, 1 : self.most + 1]


def needs_chain(sampling: Any) -> bool:
    """Return whether what vLLM computes for a request is right only along a chain.

    Penalties, forbidden words and thinking budgets count the tokens before a node by its place, and
    grammars are advanced by the tokens in their order.

    Args:
        sampling: vLLM's ``SamplingParams``; None: of a request that samples nothing.
    """
    return sampling is not None and bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.bad_words
        or sampling.structured_outputs is not None
        or sampling.thinking_token_budget is not None
    )


def install(runner_module: Any, wrap: Any) -> None:
    """Let the model runner tell our speculator about its steps, once per process.

    Args:
        runner_module: vLLM's, of Model Runner V2.
        wrap: see ``plugin.wrap``.
    """
    runner = runner_module.GPUModelRunner
    wrap(runner, _sampling, "sample_tokens", "self", "grammar_output")
    wrap(runner, partial(_telling, _added), "add_requests", "self", "scheduler_output")
    wrap(runner, partial(_telling, _prepared), "prepare_attn", "self", "input_batch")
    loading = ("load_model", "self", "load_dummy_weights", "args", "model", "kwargs")
    wrap(runner, partial(_telling, _loaded), *loading)


def _ours(runner: Any) -> Speculator | None:
    speculator = getattr(runner, "speculator", None)
    return speculator if isinstance(speculator, Speculator) else None


def _sampling(method: Any) -> Any:
    """Wrap ``sample_tokens`` to tell the speculator how many tokens to draft."""

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        speculator, state = _ours(self), self.execute_model_state
        if speculator is not None and state is not None:
            speculator.begin_step(state.num_spec_tokens_to_schedule)
        return method(self, grammar_output)

    return sample_tokens


def _telling(tell: Any, method: Any) -> Any:
    """Wrap a method to ``tell`` the speculator what it has returned."""

    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        speculator = _ours(self)
        if speculator is not None:
            tell(speculator, self, result, *args, **options)
        return result

    return wrapped


def _added(speculator: Speculator, runner: Any, result: None, scheduler_output: Any) -> None:
    if scheduler_output.scheduled_new_reqs:
        speculator.add(scheduler_output.scheduled_new_reqs, runner.req_states.req_id_to_index)


def _prepared(speculator: Speculator, runner: Any, result: Any, input_batch: Any) -> None:
    _, slots = result  # known now, so that the nodes of trees can be placed
    if speculator.trees is not None:
        speculator.trees.place(input_batch, slots)


def _loaded(speculator: Speculator, runner: Any, result: Any, *args: Any, **options: Any) -> None:
    speculator.attach(runner)
