"""What the scripts of this folder share: the command line, figures, files and other processes."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from token_recycling.bench.compare import timed
from token_recycling.bench.measures import quartiles
from token_recycling.errors import BAD_INPUT, TokenRecyclingError
from token_recycling.util.files import write_text


def run(main: Callable[..., object]) -> None:
    """Run ``main``, a function or a typer app, with the arguments of the command line.

    A ``TokenRecyclingError`` is printed as one line, and the exit code is 2.
    """
    try:
        main() if isinstance(main, typer.Typer) else typer.run(main)
    except TokenRecyclingError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


def numbers(text: str, option: str = "an option") -> list[int]:
    """Return the numbers of an option such as ``1,8,16``.

    Raises:
        TokenRecyclingError: they are not whole numbers from 1 on.
    """
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise TokenRecyclingError(
            f"{option} is {text!r}; give whole numbers from 1 on, with commas"
        )
    return found


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes on the CPU."""
    return timed(call, torch.device("cpu"))[1]


def in_turn(
    ways: dict[Any, Callable[[], float]], rounds: int, between: Callable[[], object] = list
) -> dict[Any, list[float]]:
    """Return what every way returned, in turn; the order rotates, and a first round is left out.

    ``between`` is called before each.
    """
    found: dict[Any, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            between()
            value = ways[name]()
            if turn:
                found[name].append(value)
    return found


def spread(values: Sequence[float]) -> str:
    """Return the median and the quartiles as text."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median and the quartiles of the ratios of two series, pair by pair."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def save(path: Path, values: object) -> None:
    """Write JSON."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def json_lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_text(path: Path) -> str:
    """Return the text of a file, which may be an .xz file."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")


class Asked:
    """A process that answers lines of JSON with lines of JSON."""

    def __init__(self, command: Sequence[object], **environment: str) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, question: object) -> Any:
        """Return the answer to a question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())
