"""Acceptance rates of candidates: their features, expected rates, and what has been counted."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.state import (
    CHAIN,
    INPUTS,
    PATTERNS,
    ROOT_ROW,
    ROW_KINDS,
    SETS,
    Array,
    Tables,
)

BINS = 32  # classes of a probability: its log odds from -9 on, in steps of 1/2
LONG = 4  # length from which a match is long, in tokens
RUNS = np.array([0, 1, 2, 3, 4, 5, 7, 10, 16])  # lower bound of each class of match lengths
DEPTHS = np.array([0, 1, 2, 4, 8])  # lower bound of each class of depths in the chain
PRIOR = 30.0  # weight of the expected rate, in trials
# Expected rates, fitted by lab/fit.py to 59 answers of SmolLM2-135M-Instruct.
# Per kind of row, log odds: of the rate of its candidates, a + b · log odds of the probability
# + c · log2(1 + rank), and of a candidate that the row lacks, a + b · log odds of the row's best.
IN_ROW = np.array(
    [
        [-0.58, 0.63, -0.32],
        [-0.38, 0.65, -0.40],
        [-0.14, 0.64, -0.57],
        [-2.81, 0.06, -0.41],
        [-1.49, 0.44, -0.30],
    ]
)
LACKING = np.array([[-3.86, -0.24], [-4.13, -0.35], [-4.28, -0.36], [-3.09, -0.03], [-3.40, -0.04]])
# Per class of match lengths: of the chain's first token, of later ones, and of all other tokens.
FIRST_ON_CHAIN = np.array([0.01, 0.24, 0.47, 0.60, 0.65, 0.75, 0.80, 0.87, 0.95])
LATER_ON_CHAIN = np.array([0.01, 0.60, 0.69, 0.71, 0.78, 0.81, 0.84, 0.87, 0.93])
BESIDE_CHAIN = np.array([0.01, 0.032, 0.022, 0.018, 0.013, 0.010, 0.009, 0.007, 0.004])
LOWEST, HIGHEST = 0.0005, 0.995  # bounds of calibrated rates
# float16 values up to 1 by their bits
HALVES = np.arange(0x3C01, dtype=np.uint16).view(np.float16).astype(np.float64)
_inside = np.clip(HALVES, 1e-6, 1 - 1e-4)
BIN_OF = np.clip(np.round(2 * (np.log(_inside / (1 - _inside)) + 9)), 0, BINS - 1).astype(np.int64)


@compiled
def class_of(value: int, bounds: Array) -> int:
    """Return the index of the last of ``bounds`` (ascending) that is at most ``value``."""
    index = 0
    for i in range(1, len(bounds)):
        if value >= bounds[i]:
            index = i
    return index


class FeatureOffsets(NamedTuple):
    """The first feature of each kind; candidates in a row come first, from 0 on.

    Attributes:
        lacking: candidates that a row lacks, by its kind and the class of its best probability.
            Before them are those in a row, by its kind, rank and class of the probability.
        chain: chain tokens, by classes of match length and depth.
        beside: candidates that are not the chain's token, by match length.
        nothing: the one for sources that are missing; it is the last.
    """

    lacking: int
    chain: int
    beside: int
    nothing: int


@compiled
def feature_offsets(k: int) -> FeatureOffsets:
    """Return where the features of each kind begin, for ``k`` candidates per row."""
    lacking = ROW_KINDS * k * BINS
    chain = lacking + ROW_KINDS * BINS
    beside = chain + len(RUNS) * len(DEPTHS)
    return FeatureOffsets(lacking, chain, beside, beside + len(RUNS))


@compiled
def expected_rates(k: int) -> Array:
    """Return the rate at which candidates of each feature are right before any evidence."""
    lacking, chain, beside, nothing = feature_offsets(k)
    rates = np.empty(nothing + 1)
    for kind in range(ROW_KINDS):
        a, b, c = IN_ROW[kind]
        low, slope = LACKING[kind]
        for bin_ in range(BINS):
            odds = bin_ / 2.0 - 9.0
            for rank in range(k):
                total = a + b * odds + c * math.log2(1.0 + rank)
                rates[(kind * k + rank) * BINS + bin_] = 1.0 / (1.0 + math.exp(-total))
            total = low + slope * odds
            rates[lacking + kind * BINS + bin_] = 1.0 / (1.0 + math.exp(-total))
    for run in range(len(RUNS)):
        for depth in range(len(DEPTHS)):
            rate = LATER_ON_CHAIN[run] if depth else FIRST_ON_CHAIN[run]
            rates[chain + run * len(DEPTHS) + depth] = rate
        rates[beside + run] = BESIDE_CHAIN[run]
    rates[nothing] = 0.5
    return rates


def initial_weights() -> Array:
    """Return the weights before any evidence, float64 [SETS + PATTERNS, INPUTS].

    The row of the longest context counts most; shorter ones share the rest. The sets of patterns,
    which are added to these, are 0.
    """
    weights = np.zeros((SETS + PATTERNS, INPUTS))
    for rows_there in range(4):
        levels = [0] + [level for level in (1, 2) if rows_there & level]
        for state in range(3):
            weight_set = rows_there * 3 + state
            weights[weight_set, levels] = 0.3
            weights[weight_set, levels[-1]] = 0.7
            weights[weight_set, CHAIN] = 0.5
            weights[weight_set, ROOT_ROW] = 0.3 if rows_there else 0.8
    return weights


@compiled
def refresh_logit(feature: int, tables: Tables) -> None:
    """Compute the log odds of a feature's rate: (hits + 30 · expected) / (trials + 30)."""
    hits = min(tables.evidence[0, feature], tables.evidence[1, feature])
    rate = (hits + PRIOR * tables.rates[feature]) / (tables.evidence[1, feature] + PRIOR)
    rate = min(max(rate, LOWEST), HIGHEST)
    tables.logits[feature] = math.log(rate / (1.0 - rate))


@compiled
def refresh_logits(tables: Tables) -> None:
    """Compute the log odds of every feature."""
    for feature in range(len(tables.rates)):
        refresh_logit(feature, tables)
