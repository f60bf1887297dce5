"""Figures computed from the records of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np

from token_recycling.bench.variants import BASELINE
from token_recycling.decoding.metrics import PHASES

RESAMPLES = 2000
SEED = 0  # for the bootstrap
CONFIDENCE = 95.0
RUN = 4  # tokens of a run that may recur (see ``repeats``)
DEEPEST = 16  # largest depth reported in accepted_per_depth

Record = dict[str, Any]  # of a question (see ``Runner.answer``)
Turns = list[dict[str, Any]]


def turns(record: Record, name: str, round_: int) -> Turns:
    """Return the turns of one variant in one round of a question."""
    selected: Turns = record["variants"][name]["rounds"][round_]["turns"]
    return selected


def rounds(record: Record, name: str) -> int:
    """Return how often a variant answered the question."""
    return len(record["variants"][name]["rounds"])


def new_tokens(record: Record, name: str, round_: int = 0) -> int:
    """Return the number of new tokens of the answers in one round."""
    return sum(len(turn["token_ids"]) for turn in turns(record, name, round_))


def speed(record: Record, name: str, round_: int | None = None) -> float:
    """Return tokens per second in one round, or the median over all rounds."""
    which = range(rounds(record, name)) if round_ is None else (round_,)
    return median(
        [
            new_tokens(record, name, r) / sum(float(t["seconds"]) for t in turns(record, name, r))
            for r in which
        ]
    )


def ratios(records: Sequence[Record], name: str, round_: int | None = None) -> list[float]:
    """Return the speedup of every question: tokens per second over those of the baseline."""
    return [speed(r, name, round_) / speed(r, BASELINE, round_) for r in records]


def speedup(records: Sequence[Record], name: str, round_: int) -> float:
    """Return the median of the questions' speedups in one round."""
    return median(ratios(records, name, round_))


def interval(values: Sequence[float]) -> list[float]:
    """Return the bootstrap interval of the median."""
    drawn = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    tail = (100 - CONFIDENCE) / 2
    medians = np.median(np.array(values)[drawn], axis=1)
    return [float(x) for x in np.percentile(medians, [tail, 100 - tail])]


def repeats(token_ids: Sequence[int]) -> bool:
    """Return True if an answer mostly repeats itself: drafts for it say nothing about other text.

    That is so if half of its runs of ``RUN`` tokens have occurred in it before.
    """
    runs = list(zip(*(token_ids[i:] for i in range(RUN))))
    return bool(runs) and 2 * len(set(runs)) <= len(runs)


def repeating(record: Record) -> bool:
    """Return True if an answer of the baseline mostly repeats itself."""
    return any(repeats(turn["token_ids"]) for turn in turns(record, BASELINE, 0))


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the quartiles; of a single value, three times that."""
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def accept_lengths(turns: Turns) -> list[int]:
    """Return the number of tokens emitted by each forward pass of ``turns``."""
    return [length for turn in turns for length in turn["accept_lengths"]]


def mean_accepted(lengths: Sequence[int]) -> float:
    """Return the MAT; 1 if there was no forward pass after prefill."""
    return fmean(lengths) if lengths else 1.0


def spec_bench(records: Sequence[Record], name: str) -> dict[str, float]:
    """Return Spec-Bench's aggregate: mean tokens per second over questions, first round only."""
    lengths = accept_lengths([turn for record in records for turn in turns(record, name, 0)])
    mean_speed = fmean(speed(record, name, 0) for record in records)
    return {
        "tokens_per_second": mean_speed,
        "speedup": mean_speed / fmean(speed(record, BASELINE, 0) for record in records),
        "mat": mean_accepted(lengths),
    }


def every_turn(records: Sequence[Record], name: str) -> Turns:
    """Return the turns of one variant in all rounds of all questions."""
    return [t for r in records for i in range(rounds(r, name)) for t in turns(r, name, i)]


def step_seconds(turns: Turns) -> float | None:
    """Return the median time of the steps after the prompt's; None if there is none."""
    seconds = [one for turn in turns for one in turn["step_seconds"]]
    return median(seconds) if seconds else None


def step_costs(turns: Turns) -> list[list[float]]:
    """Return [tokens verified, median seconds, steps] for every size of a step."""
    by_size: dict[int, list[float]] = {}
    for turn in turns:
        for size, seconds in zip(turn["sizes"], turn["step_seconds"]):
            by_size.setdefault(size, []).append(seconds)
    return [[size, median(found), len(found)] for size, found in sorted(by_size.items())]


def measure(records: Sequence[Record], name: str, reference: str = BASELINE) -> dict[str, Any]:
    """Return the figures of one variant over ``records``; ``speedup`` is a median over them.

    ``c`` is the median time of a step in steps of ``reference``.
    """
    speedups = ratios(records, name)
    every = every_turn(records, name)
    lengths = accept_lengths(every)
    mat = mean_accepted(lengths)
    ratio = median(speedups)
    sizes = [n for turn in every for n in turn["sizes"]]
    step, plain = step_seconds(every), step_seconds(every_turn(records, reference))
    deepest = min(max(lengths, default=1) - 1, DEEPEST)
    phases = {phase: sum(turn["phases"].get(phase, 0.0) for turn in every) for phase in PHASES}
    total = sum(phases.values())
    return {
        "questions": len(records),
        "tokens": sum(new_tokens(record, name) for record in records),
        "forwards": len(lengths),
        "tokens_per_second": median(speed(record, name) for record in records),
        "speedup": ratio,
        "speedup_interval": interval(speedups),
        "speedup_quartiles": quartiles(speedups),
        "slower_than_baseline": sum(one < 1 for one in speedups),
        "mat": mat,
        "accepted_per_depth": [
            sum(n > depth for n in lengths) / len(lengths) for depth in range(1, deepest + 1)
        ],
        "size": fmean(sizes) if sizes else None,
        "identical": fmean(turn["identical"] for turn in every),
        "ttft_seconds": median(turn["first_seconds"] for turn in every),
        "step_seconds": step,
        "c": step / plain if step and plain else None,
        "phases": {phase: spent / total for phase, spent in phases.items()} if total else None,
    }


def spread(values: Sequence[float]) -> float | None:
    """Return the range of repeated results relative to their median; None for a single one."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def by_kind(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by kind, or by suite and kind if there are several suites."""
    records = list(records)
    several = len({record["suite"] for record in records}) > 1
    groups: dict[str, list[Record]] = {}
    for record in records:
        kind = f"{record['suite']}: {record['kind']}" if several else record["kind"]
        groups.setdefault(kind, []).append(record)
    return groups
