"""Starts an engine once per mode and round, in turn, and summarises what its driver measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from engine_bench.load import ENGINES, MODES, Load, Pass
from token_recycling.errors import TokenRecyclingError, one_line

LIMIT = 3600.0
OnLife = Callable[[int, str], None]


def check(engine: str, modes: Sequence[str]) -> None:
    """Check that an engine is here and has these modes.

    Raises:
        TokenRecyclingError: it is not, or has not.
    """
    if engine not in ENGINES:
        raise TokenRecyclingError(f"no such engine: {engine}; choose from {', '.join(ENGINES)}")
    known = [mode for mode in MODES if engine == "vllm" or mode not in ("chain", "ngram_gpu")]
    if unknown := [mode for mode in modes if mode not in known]:
        raise TokenRecyclingError(
            f"{engine} has no mode {unknown[0]!r}; choose from {', '.join(known)}"
        )
    if not modes:
        raise TokenRecyclingError("choose at least one mode")
    if find_spec(engine) is None:
        raise TokenRecyclingError(
            f"{engine} is not installed here; install Token Recycling beside it (docs/serving.md)"
        )


def measure(
    engine: str,
    load: Load,
    modes: Sequence[str],
    rounds: int,
    on_life: OnLife | None = None,
    limit: float = LIMIT,
) -> dict[str, list[list[Pass]]]:
    """Serve ``load`` in every mode, ``rounds`` times; the order rotates.

    Args:
        engine: one of ``ENGINES``.
        load: its mode is replaced.
        modes: see ``MODES``.
        rounds: lives of the engine per mode.
        on_life: called before each with (round, mode).
        limit: seconds of one life, after which it has failed.

    Returns:
        By mode and round, a pass for each concurrency.

    Raises:
        TokenRecyclingError: see ``check``; or the engine failed, with its last line.
    """
    check(engine, modes)
    found: dict[str, list[list[Pass]]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        first = turn % len(modes)
        for mode in [*modes[first:], *modes[:first]]:
            if on_life is not None:
                on_life(turn, mode)
            found[mode].append(_live(engine, replace(load, mode=mode), limit))
    return found


def _live(engine: str, load: Load, limit: float) -> list[Pass]:
    """Start the engine, serve, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "load.json", Path(folder) / "passes.json"
        load.save(asked)
        command = [sys.executable, "-m", f"engine_bench.drive_{engine}", str(asked), str(out)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=limit, env=environment
            )
            return [Pass(**one) for one in json.loads(out.read_text(encoding="utf-8"))]
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()] or ["no output"]
            causes = [line for line in lines if "Error" in line] or lines
            reason = one_line(causes[-1], 300)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {limit:.0f} seconds"
        raise TokenRecyclingError(f"{engine} failed in mode {load.mode}: {reason}")


def summary(found: dict[str, list[list[Pass]]]) -> list[dict[str, Any]]:
    """Return a row of figures for each mode and concurrency; seconds, unless named otherwise."""
    rows = []
    first = next(iter(found))
    for mode, lives in found.items():
        for i, one in enumerate(lives[0]):
            passes = [life[i] for life in lives]
            texts = found[first][0][i].texts
            rates = [one.rate for one in passes]
            drafts = sum(one.drafts for one in passes)
            gaps = [gap for one in passes for gap in one.gaps]
            waits = [wait for one in passes for wait in one.first]
            per_token = [time for one in passes for time in one.per_token]
            rows.append(
                {
                    "mode": mode,
                    "concurrency": one.concurrency,
                    "tokens_per_second": median(rates),
                    "quartiles": _quartiles(rates),
                    "tpot": median(per_token) if per_token else None,
                    "ttft": median(waits),
                    "between_forwards": median(gaps) if gaps else None,
                    "tokens_per_draft": 1 + sum(p.accepted for p in passes) / drafts
                    if drafts
                    else None,
                    "same_as_first_mode": sum(
                        a == b for one in passes for a, b in zip(one.texts, texts)
                    ),
                    "requests": sum(len(one.texts) for one in passes),
                }
            )
    return rows


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 2
    low, _, high = quantiles(values, n=4, method="inclusive")
    return [low, high]


def to_dict(found: dict[str, list[list[Pass]]]) -> dict[str, Any]:
    """Return all passes without their texts, as JSON types."""
    return {
        mode: [[{**asdict(one), "texts": None} for one in life] for life in lives]
        for mode, lives in found.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summary as text, a line for each mode and concurrency."""

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.2f}"

    head = ["mode", "at once", "tokens/s", "quartiles", "x first", "TPOT ms", "TTFT ms"]
    head += ["gap ms", "tokens/draft", "same text"]
    lines = [head]
    first = rows[0]["mode"]
    base = {r["concurrency"]: r["tokens_per_second"] for r in rows if r["mode"] == first}
    for row in rows:
        low, high = row["quartiles"]
        per_draft = row["tokens_per_draft"]
        lines.append(
            [
                row["mode"],
                str(row["concurrency"]),
                f"{row['tokens_per_second']:.0f}",
                f"{low:.0f}-{high:.0f}",
                f"{row['tokens_per_second'] / base[row['concurrency']]:.2f}",
                ms(row["tpot"]),
                ms(row["ttft"]),
                ms(row["between_forwards"]),
                "" if per_draft is None else f"{per_draft:.2f}",
                f"{row['same_as_first_mode']} of {row['requests']}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )
