"""What the worker does with a batch of SGLang's scheduler: places in the cache, plain steps."""

from __future__ import annotations

from typing import Any

from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from torch import Tensor


def cache_locations(batch: Any, tokens: int) -> Tensor:
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


def decode_plainly(batch: Any, roots: Tensor) -> None:
    """Make a step of plain decoding of ``batch``; SGLang restores its fields after the step."""
    batch.spec_info = None
    batch.input_ids = roots
    batch.out_cache_loc = cache_locations(batch, 1)
    batch.seq_lens = batch.seq_lens + 1
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


def untouched(batch: Any) -> bool:
    """Return whether no penalty, grammar or sampling writes to the logits."""
    sampling = batch.sampling_info
    changes = (sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias)
    plain = all(change is None for change in changes) and not batch.has_grammar
    return bool(plain and sampling.is_all_greedy)


def text_of(request: Any, most: int) -> list[int]:
    """Return the last ``most`` tokens of a request, with the prompt as tokenised."""
    output = list(request.output_ids[-most:])
    prompt = request.origin_input_ids_unpadded
    return [*prompt[len(prompt) - max(0, most - len(output)) :], *output][-most:]
