"""Figures of every answer as rows of a table, for pandas and the like."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from token_recycling.bench import measures
from token_recycling.bench.measures import DEEPEST, Record
from token_recycling.bench.variants import BASELINE, Variant
from token_recycling.decoding.metrics import PHASES

ABOUT = ("asked", "checksum", "versions", "command")  # of the run, in every record


def _row(record: Record, variant: Variant, round_: int) -> dict[str, Any]:
    name = variant.name
    turns = measures.turns(record, name, round_)
    lengths = measures.accept_lengths(turns)
    sizes = [size for turn in turns for size in turn["sizes"]]
    depths = {
        f"accepted_{depth}": sum(n > depth for n in lengths) / max(1, len(lengths))
        for depth in range(1, DEEPEST + 1)
    }
    phases = {
        f"{phase}_seconds": sum(turn["phases"].get(phase, 0.0) for turn in turns)
        for phase in PHASES
    }
    speed = measures.speed(record, name, round_)
    return {
        "question": record["name"],
        "suite": record["suite"],
        "kind": record["kind"],
        "decoder": name,
        **variant.settings(),
        "round": round_,
        "seeds": " ".join(str(turn["seed"]) for turn in turns),
        "tokens": measures.new_tokens(record, name, round_),
        "seconds": sum(turn["seconds"] for turn in turns),
        "first_seconds": turns[0]["first_seconds"],
        "tokens_per_second": speed,
        "speedup": speed / measures.speed(record, BASELINE, round_),
        "identical": all(turn["identical"] for turn in turns),
        "repeating": measures.repeating(record),
        "forwards": len(lengths),
        "mat": measures.mean_accepted(lengths),
        "mean_size": fmean(sizes) if sizes else None,
        "step_seconds": measures.step_seconds(turns),
        **depths,
        **phases,
        "matrix_rows_before": record["variants"][name]["matrix_rows_before"],
        "token_ids": " | ".join(" ".join(map(str, turn["token_ids"])) for turn in turns),
        **{name: record[name] for name in ABOUT},
    }


def table(records: Sequence[Record], variants: Sequence[Variant]) -> str:
    """Return a row for every question, decoder and round, as CSV with a header."""
    rows = [
        _row(record, variant, round_)
        for record in records
        for variant in variants
        for round_ in range(measures.rounds(record, variant.name))
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
