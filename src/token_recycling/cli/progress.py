"""Progress on stderr: loading, prefill and long measurements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from time import monotonic
from typing import Any

from token_recycling import defaults

OnProgress = Callable[[int, int], None]  # (done, total)
PATIENCE = 2.0  # seconds after which a line says what takes so long


@contextmanager
def line_after(seconds: float, line: str) -> Iterator[None]:
    """Print a line on stderr if the context lasts longer."""
    timer = Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def busy_shown(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner labelled ``what`` on stderr; a line after a while if it is no terminal.

    Yields:
        A function that changes the label.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} …") as status:
            yield lambda label: status.update(f"{label} …")
        return
    with ExitStack() as stack:
        stack.enter_context(line_after(PATIENCE, f"{what} …"))

        def relabel(label: str) -> None:
            stack.close()
            stack.enter_context(line_after(PATIENCE, f"{label} …"))

        yield relabel


@contextmanager
def progress_shown(what: str, most: float | None = None) -> Iterator[Any]:
    """Yield an ``on_progress(done, total)`` that shows a bar with the remaining time on stderr.

    If stderr is not a terminal, it prints a line at intervals.

    Args:
        what: is counted.
        most: seconds after which the work ends, done or not; None: it ends when all is done.
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
        yield _Lines(what, most)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("" if most is None else f"at most {most:.0f} s"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Prints progress as lines, at most one per ``PAUSE`` seconds."""

    PAUSE = 10.0

    def __init__(self, what: str, max_seconds: float | None) -> None:
        now = monotonic()
        self.what, self.begun, self.last = what, now, now
        self.end = None if max_seconds is None else now + max_seconds

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if not done:
            self.begun = now
        if now - self.last < self.PAUSE or not done:
            return
        self.last = now
        remaining = (now - self.begun) / done * (total - done)
        line = f"{self.what}: {done} of {total}, {remaining:.0f} s left"
        if self.end is not None and now + remaining > self.end:
            line += f"; this call ends in {max(0.0, self.end - now):.0f} s"
        print(line, file=sys.stderr, flush=True)


@contextmanager
def prefill_shown() -> Iterator[OnProgress | None]:
    """Yield an ``on_progress`` that shows a bar on stderr for prompts longer than one chunk.

    The bar disappears at the end. If stderr is not a terminal, None is yielded.
    """
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
