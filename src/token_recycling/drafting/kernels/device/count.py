"""Counting how often candidates are right (see ``host.learn.count``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import REGISTERS, launch
from token_recycling.drafting.kernels.device.sources import (
    CONSTANT,
    INPUTS,
    PATTERNS,
    SETS,
    SOURCES,
    gather,
)
from token_recycling.drafting.kernels.device.state import DeviceTables
from token_recycling.drafting.kernels.device.vector import LEAST_STEPS, lanes
from token_recycling.drafting.kernels.host import learn, rates
from token_recycling.drafting.kernels.host.state import State

PRIOR = tl.constexpr(rates.PRIOR)
PATTERN_RATE = tl.constexpr(learn.PATTERN_RATE)
FULL_TOKENS = tl.constexpr(learn.FULL_TOKENS)
LOWEST, HIGHEST = tl.constexpr(rates.LOWEST), tl.constexpr(rates.HIGHEST)
COLUMNS = tl.constexpr(8)  # of a gradient, INPUTS of which are used
BLOCK = 256  # features whose log odds one program computes
AT_ONCE = tl.constexpr(32)  # tokens whose gradients are added at once
COUNT_WARPS = 4


@triton.jit
def _add(evidence, features, feature, right, others, there):
    """Add to hits and trials of a feature; whole numbers, so that the order does not matter."""
    tl.atomic_add(evidence + feature, right, mask=there)
    tl.atomic_add(evidence + features + feature, others, mask=there)


@triton.jit
def _token(text, emitted, length, slot):
    """Return the token of a slot of a text that goes on with ``emitted``; -1: before the text."""
    before = tl.load(text + slot, mask=(slot >= 0) & (slot < length), other=-1).to(tl.int64)
    return tl.where(slot < length, before, tl.load(emitted + slot - length, mask=slot >= length))


# Nothing but tables' widths is compiled in: numbers of rows, nodes and slots share one kernel.
@triton.jit(do_not_specialize=["V", "P", "T", "w", "c", "n", "t"])
def _count(
    states,
    state,
    valid,
    emitted,
    tables,
    moves,
    counted,
    V,
    P,
    T,
    w,
    c,
    n,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Compare the candidates for one emitted token of one row with it (see ``host.learn.count``).

    Every program adds to the evidence, and writes the gradient of its token.
    """
    row, depth = tl.program_id(0), tl.program_id(1)
    own = tl.load(states + row)
    text, new = state.context + own * w, emitted + row * t
    length = tl.load(state.lengths + own)
    chained = tl.load(state.chain_lengths + own)
    truth = tl.load(new + depth)
    used = (truth >= 0) & (tl.load(valid + row * n) != 0) & (chained >= 0)
    tl.store(counted + row * t + depth, tl.where(used, 1.0, 0.0))
    sizes = (tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64))
    if used:
        zero_tile = tl.zeros([1], tl.int64)  # a tile of one node
        # The chain holds until it differs from the emitted tokens.
        step = tl.arange(0, STEPS)
        above = step < depth
        linked = tl.load(state.chains + own * c + step, mask=above & (step < chained), other=-2)
        differs = above & (linked != tl.load(new + step, mask=above, other=-1))
        on_chain = (depth < chained) & (tl.sum(differs.to(tl.int32), 0) == 0)
        below = tl.load(state.chains + own * c + depth, mask=on_chain, other=-1)
        end = length + depth
        ids, first, odds, kind, logit, source, pattern, lacks, lack_logits, present, which = gather(
            zero_tile + _token(text, new, length, end - 3),
            zero_tile + _token(text, new, length, end - 2),
            zero_tile + _token(text, new, length, end - 1),
            zero_tile + below,
            tl.load(state.match_lengths + own),
            zero_tile.to(tl.int32) + depth,
            zero_tile == depth,
            own,
            state.roots,
            tables,
            sizes,
            1,
            K,
            WIDTH,
            FEATURES,
        )
        there = ids >= 0
        right = (ids == truth) & there
        error = right.to(tl.float32) - 1.0 / (1.0 + tl.exp(-odds))
        own_error = tl.where(first, error, 0.0)
        all_errors = tl.sum(own_error, 1)
        number_found = tl.sum(first.to(tl.float32), 1)
        is_found = tl.sum((right & first).to(tl.float32), 1)
        sets = SETS + tl.arange(0, PATTERNS)
        of_pattern = sets[:, None] == pattern
        errors = tl.sum(tl.where(of_pattern, own_error, 0.0), 1)
        gradient = moves + (row * t + depth).to(tl.int64) * (SETS + PATTERNS) * COLUMNS
        of_set = tl.arange(0, triton.next_power_of_2(SETS))
        is_set = of_set < SETS
        chosen = of_set == which
        for index in tl.static_range(SOURCES):
            from_source = source == index
            lack_logit = lack_logits[index]
            slope = tl.where(from_source, (logit - lack_logit[:, None]) * error, 0.0)
            total = lack_logit * all_errors + tl.sum(slope, 1)
            tl.store(gradient + of_set * COLUMNS + index, tl.where(chosen, total, 0.0), mask=is_set)
            totals = tl.sum(tl.where(of_pattern, slope, 0.0), 1) + lack_logit * errors
            tl.store(gradient + sets * COLUMNS + index, totals * PATTERN_RATE)
            has = tl.sum(from_source.to(tl.float32), 1)
            hit = tl.sum((from_source & right).to(tl.float32), 1)
            others = number_found - has
            lacking = present[index] & (others > 0)
            _add(tables.evidence, FEATURES[3] + 1, lacks[index], is_found - hit, others, lacking)
        constant = tl.where(chosen, all_errors, 0.0)
        tl.store(gradient + of_set * COLUMNS + CONSTANT, constant, mask=is_set)
        tl.store(gradient + sets * COLUMNS + CONSTANT, errors * PATTERN_RATE)
        _add(
            tables.evidence,
            FEATURES[3] + 1,
            kind,
            right.to(tl.float32),
            there.to(tl.float32),
            there,
        )


@triton.jit(do_not_specialize=["tokens", "features"])
def _calibrate(moves, counted, tables, tokens, features, learning_rate, BLOCK: tl.constexpr):
    """Move one weight set along the gradients of ``tokens`` tokens, or compute log odds.

    Gradients are added in a fixed order, so that results do not depend on timing.
    """
    number = tl.program_id(0)
    if number < SETS + PATTERNS:
        lane = tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float64)
        seen = tl.zeros([], tl.float32)
        for begin in range(0, tokens, AT_ONCE):
            token = begin + tl.arange(0, AT_ONCE)
            used = tl.load(counted + token, mask=token < tokens, other=0.0)
            seen += tl.sum(used, 0)
            place = (token.to(tl.int64) * (SETS + PATTERNS) + number) * COLUMNS
            mask = (used[:, None] > 0) & (lane[None, :] < INPUTS)
            part = tl.load(moves + place[:, None] + lane[None, :], mask=mask, other=0.0)
            total += tl.sum(part.to(tl.float64), 0)
        step = learning_rate * (FULL_TOKENS / tl.maximum(seen, FULL_TOKENS))
        inside = lane < INPUTS
        weight = tl.load(tables.weights + number * INPUTS + lane, mask=inside, other=0.0)
        weight += step.to(tl.float64) * total
        tl.store(tables.weights + number * INPUTS + lane, weight, mask=inside)
        tl.store(tables.rounded + number * INPUTS + lane, weight.to(tl.float32), mask=inside)
    else:
        feature = (number - SETS - PATTERNS) * BLOCK + tl.arange(0, BLOCK)
        there = feature < features
        hits = tl.load(tables.evidence + feature, mask=there, other=0.0)
        trials = tl.load(tables.evidence + features + feature, mask=there, other=0.0)
        expected = tl.load(tables.rates + feature, mask=there, other=0.5)
        rate = (tl.minimum(hits, trials) + PRIOR * expected) / (trials + PRIOR)
        rate = tl.minimum(tl.maximum(rate, LOWEST), HIGHEST)
        tl.store(tables.logits + feature, tl.log(rate / (1.0 - rate)), mask=there)


def count(
    states: Tensor,
    state: State,
    valid: Tensor,
    emitted: Tensor,
    tables: DeviceTables,
    sizes: tuple[int, int, int],
    learning_rate: float,
) -> None:
    """Count which candidates came, and move the weights.

    Args:
        states: int64 [B], of the rows of the batch.
        state: texts without the emitted tokens, and the candidates that the roots had.
        valid: bool [B, n], nodes that were verified.
        emitted: int64 [B, t], ``NO_TOKEN`` behind the last one.
        tables: evidence, weights and log odds are changed.
        sizes: V, P and T.
        learning_rate: of the weights.
    """
    (batch, t), k = emitted.shape, tables.candidates.shape[1]
    sets = len(tables.weights)
    moves = emitted.new_empty((batch, t, sets, COLUMNS.value), dtype=torch.float32)
    counted = emitted.new_empty((batch, t), dtype=torch.float32)
    offsets = rates.feature_offsets(k)
    features = offsets.nothing + 1
    launch(
        _count,
        (batch, t),
        *(states, state, valid, emitted, tables, moves, counted, *sizes),
        *(state.context.shape[1], state.chains.shape[1], valid.shape[1], t),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        STEPS=lanes(t, LEAST_STEPS),
        FEATURES=tuple(offsets),
        num_warps=COUNT_WARPS,
        coalesce=False,
        **REGISTERS,
    )
    launch(
        _calibrate,
        (sets + triton.cdiv(features, BLOCK),),
        *(moves, counted, tables, batch * t, features, learning_rate),
        BLOCK=BLOCK,
        num_warps=1,
    )
