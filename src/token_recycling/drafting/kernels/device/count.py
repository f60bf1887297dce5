"""Counting how often candidates are right (see ``host.count``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from token_recycling.drafting.kernels.device.sources import (
    INPUTS,
    PATTERNS,
    SETS,
    gather,
    lanes_per_row,
)
from token_recycling.drafting.kernels.device.state import (
    DeviceTables,
    Evidence,
    RootCandidates,
    Texts,
)
from token_recycling.drafting.kernels.host import learn, rates
from token_recycling.util.launch import REGISTERS, launch
from token_recycling.util.vector import LEAST_STEPS, at, lanes

PRIOR = tl.constexpr(rates.PRIOR)
PATTERN_RATE = tl.constexpr(learn.PATTERN_RATE)
LOWEST, HIGHEST = tl.constexpr(rates.LOWEST), tl.constexpr(rates.HIGHEST)
COUNT_WARPS = 4


@triton.jit
def _store_evidence(feature, hits, trials, evidence, rates, logits, features, counted):
    """Store the counts of features and the log odds of their rates (see ``refresh_logit``)."""
    tl.store(evidence + feature, hits, mask=counted)
    tl.store(evidence + features + feature, trials, mask=counted)
    expected = tl.load(rates + feature, mask=counted, other=0.5)
    rate = (tl.minimum(hits, trials) + PRIOR * expected) / (trials + PRIOR)
    rate = tl.minimum(tl.maximum(rate, LOWEST), HIGHEST)
    tl.store(logits + feature, tl.log(rate / (1.0 - rate)), mask=counted)


@triton.jit
def _count_lack(lack, there, others, right, evidence, rates, logits, features):
    """Count ``others`` candidates that a source lacks, of which ``right`` are right."""
    counted = there & (others > 0)
    hits = tl.load(evidence + lack, mask=counted, other=0.0) + right
    trials = tl.load(evidence + features + lack, mask=counted, other=0.0) + others
    _store_evidence(lack, hits, trials, evidence, rates, logits, features, counted)


@triton.jit
def _move(weights, exact, index, change):
    """Change weights in float64, and their copy in float32."""
    weight = tl.load(exact + index) + change
    tl.store(exact + index, weight)
    tl.store(weights + index, weight.to(tl.float32))


# Nothing but tables' widths is compiled in: numbers of rows, nodes and slots share one kernel.
@triton.jit(do_not_specialize=["batch", "V", "P", "T", "w", "c", "n", "t", "features"])
def _count(
    context,
    lengths,
    chain,
    counts,
    runs,
    root_ids,
    root_p,
    rejected,
    valid,
    emitted,
    candidates,
    probabilities,
    keys,
    weights,
    logits,
    classes,
    evidence,
    exact,
    rates,
    batch,
    V,
    P,
    T,
    w,
    c,
    n,
    t,
    features,
    learning_rate,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compare candidates along the emitted tokens with these; extend the contexts.

    One program for all rows, in order, so that results do not depend on timing (see
    ``host.count``).
    """
    step = tl.arange(0, STEPS)
    zero_tile = tl.zeros([1], tl.int64)  # a tile of one node
    V, P, T = tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64)
    for row in range(0, batch):
        text = context + row * w
        length = tl.load(lengths + row)
        active = tl.load(valid + row * n) != 0
        chained = tl.load(counts + row)
        run = tl.load(runs + row)
        emitted_tokens = tl.load(emitted + row * t + step, mask=step < t, other=-1)
        number = tl.sum((emitted_tokens >= 0).to(tl.int32), 0)
        steps = tl.where(active & (chained >= 0), number, 0)
        token = tl.load(text + length - 1, mask=length > 0, other=0)
        last = tl.load(text + length - 2, mask=length > 1, other=-1)
        before = tl.load(text + length - 3, mask=length > 2, other=-1)
        on_chain = length >= 0
        for number_before in range(0, steps):
            depth = tl.full([], 0, tl.int32) + number_before
            truth = at(emitted_tokens, step, depth)
            linked = on_chain & (depth < chained)
            below = tl.load(chain + row * c + depth, mask=linked, other=-1)
            (
                ids,
                first,
                odds,
                kind,
                logit,
                source,
                pattern,
                lacks,
                lack_logits,
                sources_present,
                which,
            ) = gather(
                zero_tile + before,
                zero_tile + last,
                zero_tile + token,
                zero_tile + below,
                run,
                zero_tile.to(tl.int32) + depth,
                zero_tile == number_before,
                root_ids + row * (K - 1),
                root_p + row * (K - 1),
                rejected + row,
                V,
                P,
                T,
                candidates,
                probabilities,
                keys,
                weights,
                logits,
                classes,
                1,
                K,
                WIDTH,
            )
            present = ids >= 0
            right = (ids == truth) & present
            error = right.to(tl.float32) - 1.0 / (1.0 + tl.exp(-odds))
            own_error = tl.where(first, error, 0.0)
            all_errors = tl.sum(own_error, 1)
            number_found = tl.sum(first.to(tl.float32), 1)
            is_found = tl.sum((right & first).to(tl.float32), 1)
            sets = SETS + tl.arange(0, PATTERNS)
            of_pattern = sets[:, None] == pattern
            errors = tl.sum(tl.where(of_pattern, own_error, 0.0), 1)
            tl.debug_barrier()  # everything is read before anything is written
            for index in tl.static_range(5):
                from_source = source == index
                lack_logit = lack_logits[index]
                slope = tl.where(from_source, (logit - lack_logit[:, None]) * error, 0.0)
                gradient = lack_logit * all_errors + tl.sum(slope, 1)
                _move(weights, exact, which * INPUTS + index, learning_rate * gradient)
                gradients = tl.sum(tl.where(of_pattern, slope, 0.0), 1)
                gradients += lack_logit * errors
                change = learning_rate * PATTERN_RATE * gradients
                _move(weights, exact, sets * INPUTS + index, change)
                has = tl.sum(from_source.to(tl.float32), 1)
                hit = tl.sum((from_source & right).to(tl.float32), 1)
                _count_lack(
                    lacks[index],
                    sources_present[index],
                    number_found - has,
                    is_found - hit,
                    evidence,
                    rates,
                    logits,
                    features,
                )
            _move(weights, exact, which * INPUTS + 5, learning_rate * all_errors)
            _move(weights, exact, sets * INPUTS + 5, learning_rate * PATTERN_RATE * errors)
            hits = tl.load(evidence + kind, mask=present, other=0.0) + right.to(tl.float32)
            trials = tl.load(evidence + features + kind, mask=present, other=0.0) + 1.0
            _store_evidence(kind, hits, trials, evidence, rates, logits, features, present)
            tl.debug_barrier()
            on_chain = linked & (below == truth)
            before = last
            last = token
            token = truth
        tl.debug_barrier()  # all warps have read the length
        # The last emitted token is the next root.
        more = tl.minimum(number - 1, w - length.to(tl.int32))
        tl.store(text + length + step, emitted_tokens, mask=step < more)
        tl.store(lengths + row, length + tl.maximum(more, 0))


def count(
    texts: Texts,
    own: RootCandidates,
    tables: DeviceTables,
    evidence: Evidence,
    valid: Tensor,
    emitted: Tensor,
    learning_rate: float,
) -> None:
    """Append the emitted tokens to the texts, and count which candidates came.

    Args:
        texts: changed.
        own: the candidates that the roots had.
        tables: weights and log odds are changed.
        evidence: changed.
        valid: bool [B, n], nodes that were verified.
        emitted: int64 [B, t], ``NO_TOKEN`` behind the last one.
        learning_rate: of the weights.
    """
    launch(
        _count,
        (1,),
        *texts,
        *own,
        valid,
        emitted,
        *tables[:6],
        *evidence,
        len(texts.lengths),
        *tables.sizes,
        texts.context.shape[1],
        texts.chains.shape[1],
        valid.shape[1],
        emitted.shape[1],
        evidence.counts.shape[1],
        learning_rate,
        K=tables.k,
        WIDTH=lanes_per_row(tables.candidates),
        STEPS=lanes(emitted.shape[1], LEAST_STEPS),
        num_warps=COUNT_WARPS,
        coalesce=False,
        **REGISTERS,
    )
