"""The worker of SGLang's scheduler: drafts trees and verifies them with SGLang's own code."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify
from torch import Tensor

from skinny_kernels.modes import ordinary_tensors
from token_recycling.integrations.engines.options import ServingOptions, load_tokenizer
from token_recycling.integrations.engines.versions import check_signature
from token_recycling.integrations.sglang.batches import cache_locations, decode_plainly, untouched
from token_recycling.integrations.sglang.drafting import BatchDrafting
from token_recycling.integrations.sglang.sampled import draw_on_cpus
from token_recycling.integrations.sglang.trees import full_masks, links


class Worker(NGRAMWorker):  # type: ignore[misc]
    """SGLang's n-gram worker with our drafter in place of its corpus on the host.

    Drafts are made on the host. A request's slot is its index in SGLang's own pool.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        """Read the options.

        Raises:
            TokenRecyclingError: an option is invalid, or SGLang's interface has changed.
        """
        BaseSpecWorker.__init__(self)
        check_signature(
            NGRAMWorker.forward_batch_generation,
            *("self", "batch", "on_publish"),
            newer="pp_proxy_tensors",
        )
        check_signature(NGRAMWorker._prepare_for_speculative_decoding, "self", "batch")
        self.options = ServingOptions.from_environment()
        self.server_args = server_args
        self.enable_overlap = not get_schedule().disable_overlap_schedule
        self._target_worker = target_worker
        self._watched = _WatchedTarget(target_worker)
        self.model_runner = target_worker.model_runner
        self.page_size = get_schedule().page_size
        self.topk = get_spec().speculative_eagle_topk
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.width: int = get_spec().speculative_num_draft_tokens  # maximum nodes of a draft
        self.draft_token_num = self.speculative_num_draft_tokens = self.width
        self.device = get_device().device
        self.adaptive_controller = None
        self.grammar_tree_host: Any = None
        self._without_drafts = False  # whether the step runs as without speculation
        self.ngram_corpus = _NoCorpus()
        self._prev_decode_rids: set[str] = set()

    @property
    def target_worker(self) -> Any:
        """The target worker, wrapped to record its logits."""
        return self._watched

    def clear_cache_pool(self) -> None:
        """Do nothing: the matrix does not depend on the cache."""

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        """Refuse a corpus, which only the n-gram algorithm uses.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "TOKEN_RECYCLING does not take a corpus; it learns from the target"
        )

    def _init_preallocated_tensors(self) -> None:
        slots = self.req_to_token_pool.req_to_token.shape[0]
        server = self.server_args
        tokenizer = partial(
            load_tokenizer,
            None if server.skip_tokenizer_init else server.tokenizer_path,
            trust_remote_code=server.trust_remote_code,
        )
        vocabulary = self.model_runner.model_config.vocab_size
        drafter = self.options.make(vocabulary, self.width - 1, tokenizer)
        if self.device == "cpu":
            draw_on_cpus(self.model_runner.sampler)
        self.drafting = BatchDrafting(
            self.options,
            drafter,
            slots=slots,
            width=self.width,
            device_type=self.model_runner.device,
            group=get_parallel().tp_group,
        )

    def _captured(self, requests: int) -> bool:
        """Return whether steps of this number of requests run in a graph, of whole drafts only."""
        runner = getattr(self.model_runner, "decode_cuda_graph_runner", None)
        return runner is not None and requests <= max(getattr(runner, "capture_bs", None) or [0])

    def _may_decode(self, batch: Any) -> bool:
        """Return whether the step runs as without speculation.

        Not if anything is learnt from it: sampling changes the logits in place. Logprobs and
        grammars need SGLang's path for drafts, and so do recurrent states and the graphs of GPUs.
        """
        return not (
            self.drafting.takes_part
            or self.device != "cpu"
            or batch.return_logprob
            or batch.has_grammar
            or mambaish_config(self.model_runner.model_config) is not None
        )

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        """Turn a decoding batch into a batch that verifies trees, or into a plain one."""
        if not batch.forward_mode.is_decode():
            return
        with ordinary_tensors():
            # With overlap the last step's tokens are not in the requests yet.
            late = self.enable_overlap and not batch.grammar_needs_sync()
            captured = self._captured(len(batch.reqs))
            draft = self.drafting.draft(batch, captured=captured, late=late)
        self._without_drafts = self._may_decode(batch)
        if self._without_drafts:
            decode_plainly(batch, draft.tokens[:, 0])
            return
        rows, n = draft.tokens.shape
        self.draft_token_num = n  # read by the code of SGLang that runs after this method
        if batch.has_grammar:  # SGLang applies it to the tree on the host
            self.grammar_tree_host = (
                draft.ancestors.flatten().numpy(),
                draft.tokens.flatten().numpy(),
            )
        draft = draft.to(self.device)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = draft.tokens.flatten()
        batch.out_cache_loc = cache_locations(batch, n)
        prepare_mamba_track_for_verify(batch)
        children, siblings = links(draft)
        on_cpu = torch.device(self.device).type == "cpu"
        batch.spec_info = NgramVerifyInput(
            draft_token=batch.input_ids,
            # SGLang's CPU kernels take the mask over the nodes, others over the context too.
            custom_mask=draft.ancestors.flatten()
            if on_cpu
            else full_masks(draft, batch.seq_lens, batch.seq_lens_cpu),
            positions=(batch.seq_lens.long()[:, None] + draft.depths).flatten(),
            retrieve_index=torch.arange(rows * n, device=self.device).view(rows, n),
            retrieve_next_token=children,
            retrieve_next_sibling=siblings,
            draft_token_num=n,
        )

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, *others: Any, **options: Any
    ) -> GenerationBatchResult:
        """Run a step of the scheduler's batch: read prompts, or verify a tree per request."""
        rows, verifies = len(batch.reqs), batch.forward_mode.is_decode()
        slots = batch.req_pool_indices.long().cpu() if rows else None
        self._watched.logits = None
        result = super().forward_batch_generation(batch, on_publish, *others, **options)
        n, self.draft_token_num = self.draft_token_num, self.width
        if slots is None:
            return result
        if not verifies:
            with ordinary_tensors():
                self.drafting.begin(batch, self._watched.logits, result)
            return result
        if self._without_drafts:
            result.next_token_ids = result.next_draft_input.accept_tokens
            self.drafting.record(batch, rows, 1)
            return result
        lengths = result.accept_lens.long().cpu()
        if self.drafting.takes_part:
            assert self._watched.logits is not None
            with ordinary_tensors():
                self.drafting.learn(slots, self._watched.logits, result, lengths, n)
        self.drafting.record(batch, int(lengths.sum()), n)
        return self._widened(result, n) if n < self.width else result

    def _widened(self, result: GenerationBatchResult, n: int) -> GenerationBatchResult:
        """Pad the output of a step with fewer nodes to the width that SGLang expects."""
        after = result.next_draft_input
        tokens = after.accept_tokens.view(-1, n)
        wide = torch.nn.functional.pad(tokens, (0, self.width - n)).flatten()
        result.next_token_ids = wide
        result.next_draft_input = NgramVerifyInput(
            draft_token_num=self.width,
            new_seq_lens=after.new_seq_lens,
            accept_tokens=wide,
            accept_lens=after.accept_lens,
        )
        return result

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: there is no corpus."""


class _NoCorpus:
    """Stand-in for the n-gram worker's corpus."""

    def erase_match_state(self, requests: list[str]) -> None:
        """Do nothing: there is no state."""


class _WatchedTarget:
    """Wrapper of the target worker that records the logits before anything changes them."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
        result = self._target.forward_batch_generation(batch, *args, **options)
        output = result.logits_output
        if output is not None and output.next_token_logits is not None:
            logits = output.next_token_logits
            self.logits = logits if untouched(batch) else logits.clone()
        return result
