"""What goes on, on stderr: loading, reading a prompt, long measurements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from token_recycling import defaults


@contextmanager
def busy_shown(what: str) -> Iterator[None]:
    """Show a spinner on stderr while ``what`` goes on, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


@contextmanager
def progress_shown(what: str) -> Iterator[Any]:
    """Yield an ``on_progress(done, total)`` that draws a bar with an estimate on stderr.

    Where stderr is no terminal it writes a line now and then.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress as lines, at most one in ``PAUSE`` seconds."""

    PAUSE = 20.0

    def __init__(self, what: str) -> None:
        self.what, self.begun, self.last, self.first = what, monotonic(), monotonic(), -1

    def __call__(self, done: int, total: int) -> None:
        if self.first < 0:  # what a resumed run found done took no time
            self.first, self.begun = done, monotonic()
        now = monotonic()
        if now - self.last < self.PAUSE or done == self.first:
            return
        self.last = now
        left = (now - self.begun) / (done - self.first) * (total - done)
        print(f"{self.what}: {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)


@contextmanager
def prefill_shown() -> Iterator[Any]:
    """Yield an ``on_progress`` that draws a bar on stderr for prompts of several chunks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def on_progress(done: int, total: int) -> None:
        if total > defaults.PREFILL_CHUNK and not bar.tasks:
            bar.start()
            bar.add_task("", total=total)
        if bar.tasks:
            bar.update(bar.tasks[0].id, completed=done)
        if done == total:
            bar.stop()

    try:
        yield on_progress
    finally:
        bar.stop()
