"""Two runs on the same questions, compared question by question."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from token_recycling.bench import measures
from token_recycling.bench.measures import Record
from token_recycling.bench.tables import Table, percent
from token_recycling.errors import TokenRecyclingError

Pairs = list[tuple[Record, Record]]


def pairs_of(first: Sequence[Record], second: Sequence[Record]) -> Pairs:
    """Return the records of the questions that both runs answered, in the first one's order.

    Raises:
        TokenRecyclingError: there is none.
    """
    others = {(record["name"], record["prompt"]): record for record in second}
    pairs = [(one, others[key]) for one in first if (key := (one["name"], one["prompt"])) in others]
    if not pairs:
        raise TokenRecyclingError("the runs have no question in common")
    return pairs


def compared(pairs: Pairs, first: str, second: str) -> dict[str, Any]:
    """Compare decoder ``first`` of the first run with ``second`` of the second one.

    Ratios are the second by the first, medians over questions, with the bootstrap interval of
    ``measures.interval``; of tokens per second, of forwards per token, and of the speedup over each
    run's own baseline, which two machines can be compared by.
    """
    sides = tuple(zip(zip(*pairs), (first, second)))
    speeds = [[measures.speed(record, name) for record in records] for records, name in sides]
    own = [measures.ratios(records, name) for records, name in sides]
    forwards = [
        [_forwards_per_token(record, name) for record in records] for records, name in sides
    ]

    def ratio(figures: list[list[float]]) -> dict[str, Any]:
        ratios = [second / first for first, second in zip(*figures) if first and second]
        if not ratios:
            return {"median": 1.0, "interval": [1.0, 1.0]}
        return {"median": median(ratios), "interval": measures.interval(ratios)}

    same = [
        [turn["token_ids"] for turn in measures.turns(one, first, 0)]
        == [turn["token_ids"] for turn in measures.turns(other, second, 0)]
        for one, other in pairs
    ]
    return {
        "first": first,
        "second": second,
        "questions": len(pairs),
        "tokens_per_second": [median(side) for side in speeds],
        "mat": [
            measures.mean_accepted(measures.accept_lengths(measures.every_turn(*side)))
            for side in sides
        ],
        "speed": ratio(speeds),
        "speedup": ratio(own),
        "forwards": ratio(forwards),
        "identical": sum(same) / len(same),
    }


def _forwards_per_token(record: Record, name: str) -> float:
    turns = measures.every_turn([record], name)
    return len(measures.accept_lengths(turns)) / sum(len(turn["token_ids"]) for turn in turns)


def table(comparisons: Sequence[dict[str, Any]]) -> Table:
    """Return one row per comparison."""

    def cell(ratio: dict[str, Any]) -> str:
        low, high = ratio["interval"]
        return f"{ratio['median']:.3f} ({low:.3f}–{high:.3f})"

    rows = []
    for one in comparisons:
        name = one["first"] if one["first"] == one["second"] else f"{one['first']}, {one['second']}"
        speeds, mats = one["tokens_per_second"], one["mat"]
        rows.append(
            [
                name,
                str(one["questions"]),
                f"{speeds[0]:.1f}, {speeds[1]:.1f}",
                cell(one["speed"]),
                cell(one["speedup"]),
                f"{mats[0]:.2f}, {mats[1]:.2f}",
                cell(one["forwards"]),
                percent(one["identical"]),
            ]
        )
    columns = ["decoder", "questions", "tokens/s", "ratio (95 %)", "ratio of speedups", "MAT"]
    return Table([*columns, "ratio of forwards", "same text"], rows)
