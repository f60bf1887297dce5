"""The worker of SGLang's scheduler: drafts trees and verifies them with SGLang's own code."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify
from torch import Tensor

from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.integrations.engines.options import ServingOptions, load_tokenizer
from token_recycling.integrations.engines.requests import RequestDrafter, same_on_all_ranks
from token_recycling.integrations.engines.step_logits import StepLogits
from token_recycling.integrations.engines.versions import check_signature
from token_recycling.integrations.sglang.sampled import draw_on_cpus
from token_recycling.integrations.sglang.trees import full_masks, links
from token_recycling.util.modes import ordinary_tensors
from token_recycling.util.tokens import NO_TOKEN


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
            NGRAMWorker.forward_batch_generation, "self", "batch", "on_publish", "pp_proxy_tensors"
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
        # In the step that runs: whether the drafter takes part, and whether SGLang runs it as
        # without speculation.
        self._drafting = self._without_drafts = False
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
        drafter = self.options.make(
            vocabulary,
            self.width - 1,
            tokenizer,
            checkpoint=server.model_path,
            revision=server.revision,
        )
        self.requests = RequestDrafter(drafter, slots, self.width, context=self.options.context)
        if self.device == "cpu":
            draw_on_cpus(self.model_runner.sampler)
        group = get_parallel().tp_group
        first = group is None or group.rank_in_group == 0
        self._keeper = self.options.keeper(drafter) if first else None
        # Ranks measure different times, but must verify the same trees.
        alone = group is None or group.world_size == 1
        self.size = self.options.size(drafter, self.model_runner.device) if alone else None
        self._paused: set[int] = set()  # slots whose requests have been decoded without drafter
        self._ended, self._requests = perf_counter(), list[str]()

    def _captured(self, requests: int) -> bool:
        """Return whether steps of this number of requests run in a graph, of whole drafts only."""
        runner = getattr(self.model_runner, "decode_cuda_graph_runner", None)
        return runner is not None and requests <= max(getattr(runner, "capture_bs", None) or [0])

    def _draft(self, batch: Any) -> DraftTree:
        """Draft for a decoding batch: as many nodes for each request as are worth their time."""
        rows = len(batch.reqs)
        before = batch.spec_info
        tokens = before.accept_tokens.view(rows, -1).long().cpu()
        lengths = before.accept_lens.long().cpu()
        roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        slots = batch.req_pool_indices.long().cpu()
        captured = self._captured(rows)
        size = None if captured else self.size
        most = self.width if captured else self.options.nodes_for(rows, self.width)
        if size is not None:
            size.begin(rows)
        self._drafting = most > 1 and (size is None or size.pays)
        if not self._drafting:
            self._paused.update(slots.tolist())
            return root_only(roots)
        self._resume(batch, slots, tokens, lengths)
        draft = self.requests.propose(slots, roots, most)
        if size is not None and draft.scores is not None:
            most = size.choose(draft)
        # A drafter with few candidates may propose fewer nodes; SGLang requires ``most``.
        draft = self.requests.drafts(slots).first(most)
        draft = same_on_all_ranks(get_parallel().tp_group, draft)
        self.requests.replace_drafts(slots, draft)
        return draft

    def _resume(self, batch: Any, slots: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Give the drafter the texts of requests that it has not followed.

        ``tokens`` int64 [B, n] and ``lengths`` int64 [B] are what the last step emitted.
        """
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._paused]
        if not rows:
            return
        # With overlap the last step's tokens are not in the requests yet.
        late = self.enable_overlap and not batch.grammar_needs_sync()
        texts = []
        for row in rows:
            text = _text(batch.reqs[row], self.options.context)
            if late:
                text += tokens[row, : lengths[row]].tolist()
            texts.append(text[:-1])
        self.requests.begin(slots[torch.tensor(rows, device="cpu")], texts)
        self._paused.difference_update(slots.tolist())

    def _may_decode(self, batch: Any) -> bool:
        """Return whether the step runs as without speculation.

        Not if anything is learnt from it: sampling changes the logits in place. Logprobs and
        grammars need SGLang's path for drafts, and so do recurrent states and the graphs of GPUs.
        """
        return not (
            self._drafting
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
            draft = self._draft(batch)
        self._without_drafts = self._may_decode(batch)
        if self._without_drafts:
            _decode(batch, draft.tokens[:, 0])
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
        batch.out_cache_loc = _cache_locations(batch, n)
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
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a step of the scheduler's batch: read prompts, or verify a tree per request."""
        rows, verifies = len(batch.reqs), batch.forward_mode.is_decode()
        slots = batch.req_pool_indices.long().cpu() if rows else None
        self._watched.logits = None
        result = super().forward_batch_generation(batch, on_publish, pp_proxy_tensors)
        n, self.draft_token_num = self.draft_token_num, self.width
        if slots is None:
            return result
        if not verifies:
            with ordinary_tensors():
                self._begin(batch, result)
            self._requests = []
            return result
        if self._without_drafts:
            result.next_token_ids = result.next_draft_input.accept_tokens
            self._record(batch, rows, 1)
            return result
        lengths = result.accept_lens.long().cpu()
        if self._drafting:
            with ordinary_tensors():
                self._learn(slots, result, lengths, n)
        self._record(batch, int(lengths.sum()), n)
        return self._widened(result, n) if n < self.width else result

    def _record(self, batch: Any, tokens: int, n: int) -> None:
        """Tell the draft-size policy what the step has cost, if it followed another directly."""
        now = perf_counter()
        seconds, before = now - self._ended, self._requests
        self._ended, self._requests = now, [request.rid for request in batch.reqs]
        if self.size is not None:
            rows = len(self._requests)
            timed = before == self._requests and self._drafting is (n > 1)
            self.size.record(rows, rows * (n - 1), tokens / rows, seconds if timed else None)

    def _learn(self, slots: Tensor, result: GenerationBatchResult, lengths: Tensor, n: int) -> None:
        """Learn from the target's logits at every node and from the accepted tokens.

        ``lengths`` int64 [B]: accepted tokens of each request, the last one included.
        """
        rows = len(slots)
        tokens = result.next_token_ids.view(rows, n).long().cpu()
        behind = torch.arange(n, device="cpu") >= lengths[:, None]
        assert self._watched.logits is not None
        logits = StepLogits(self._watched.logits, [n] * rows)
        emitted = tokens.masked_fill(behind, NO_TOKEN)
        self.requests.observe(slots, logits, list(range(rows)), logits.counts, emitted)
        if self._keeper is not None:
            self._keeper.tick()

    def _begin(self, batch: Any, result: GenerationBatchResult) -> None:
        """Start drafting for the requests whose prompts have been read completely."""
        read = [
            row
            for row, request in enumerate(batch.reqs)
            if request.extend_end >= len(request.origin_input_ids) + len(request.output_ids)
        ]
        if not read or not batch.forward_mode.is_extend():
            return
        texts = [_text(batch.reqs[row], self.options.context) for row in read]
        index = torch.tensor(read, device="cpu")
        slots = batch.req_pool_indices.long().cpu()[index]
        self._paused.difference_update(slots.tolist())
        self.requests.begin(slots, [text[:-1] for text in texts])
        roots = torch.tensor([text[-1] for text in texts], device="cpu")
        self.requests.propose(slots, roots, 1)
        logits = self._watched.logits
        # Sampling has already run; use the logits only if it leaves them unchanged.
        if logits is None or len(logits) != len(batch.reqs) or not _untouched(batch):
            return
        emitted = result.next_token_ids.long().cpu()[index][:, None]
        found = StepLogits(logits, [1] * len(logits))
        self.requests.observe(slots, found, read, [1] * len(read), emitted)

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
            self.logits = logits if _untouched(batch) else logits.clone()
        return result


def _cache_locations(batch: Any, tokens: int) -> Tensor:
    """Return the places in the KV cache of the next ``tokens`` tokens of each request, [B · n]."""
    located: Tensor = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=batch.req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens,
        end_offset=batch.seq_lens + tokens,
        batch_size=len(batch.reqs),
        draft_token_num=tokens,
        device=batch.device,
    )
    return located


def _decode(batch: Any, roots: Tensor) -> None:
    """Make a step of plain decoding of ``batch``; SGLang restores its fields after the step."""
    batch.spec_info = None
    batch.input_ids = roots
    batch.out_cache_loc = _cache_locations(batch, 1)
    batch.seq_lens = batch.seq_lens + 1
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


def _untouched(batch: Any) -> bool:
    """Return whether no penalty, grammar or sampling writes to the logits."""
    sampling = batch.sampling_info
    changes = (sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias)
    plain = all(change is None for change in changes) and not batch.has_grammar
    return bool(plain and sampling.is_all_greedy)


def _text(request: Any, most: int) -> list[int]:
    """Return the last ``most`` tokens of a request, with the prompt as tokenised."""
    output = list(request.output_ids[-most:])
    prompt = request.origin_input_ids_unpadded
    return [*prompt[len(prompt) - max(0, most - len(output)) :], *output][-most:]
