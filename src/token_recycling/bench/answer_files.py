"""Answer files in Spec-Bench's format, one per variant, readable by its scripts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from token_recycling.bench.measures import Record, accept_lengths
from token_recycling.util.files import make_folder, write_text

PLAIN_NUMBER = re.compile("0|[1-9][0-9]{0,17}")  # survives str -> int -> str unchanged
LONGEST = 100  # characters of a variant's name kept in its file name


def file_names(variants: Iterable[str]) -> dict[str, str]:
    """Return a file name per variant, unique even on a case-insensitive file system."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for variant in variants:
        name = re.sub(r"[^A-Za-z0-9.=@_-]+", "_", variant)
        if len(name) > LONGEST or name.lower() in taken:
            name = f"{name[:LONGEST]}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"
        taken.add(name.lower())
        names[variant] = f"{name}.jsonl"
    return names


def line(record: Record, variant: str) -> dict[str, Any]:
    """Return the answer line of one question.

    Every round is a choice; Spec-Bench reads only the first. ``wall_time`` is the whole call
    including prefill, as in Spec-Bench.
    """
    row = record["variants"][variant]
    identity = hashlib.sha256(f"{record['name']} {variant}".encode()).hexdigest()[:22]
    choices = []
    for index, round_ in enumerate(row["rounds"]):
        turns = round_["turns"]
        choices.append(
            {
                "index": index,
                "turns": [turn["text"] for turn in turns],
                "decoding_steps": [len(turn["accept_lengths"]) for turn in turns],
                "new_tokens": [len(turn["token_ids"]) for turn in turns],
                "wall_time": [turn["seconds"] for turn in turns],
                "accept_lengths": accept_lengths(turns),
                "first_token_time": [turn["first_seconds"] for turn in turns],
                "identical": [turn["identical"] for turn in turns],
            }
        )
    number = record["id"]
    return {
        "question_id": int(number) if PLAIN_NUMBER.fullmatch(number) else number,
        "suite": record["suite"],
        "category": record["category"],
        "answer_id": identity,
        "model_id": variant,
        "matrix_rows_before": row["matrix_rows_before"],
        "choices": choices,
        "tstamp": record["time"],
    }


def write(records: Sequence[Record], folder: Path) -> None:
    """Write ``folder/VARIANT.jsonl`` for every variant."""
    make_folder(folder)
    for variant, name in file_names(records[0]["variants"]).items():
        text = "".join(json.dumps(line(record, variant)) + "\n" for record in records)
        write_text(folder / name, text)
