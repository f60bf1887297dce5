"""Output of the subcommands: streamed answers, legends and statistics."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from token_recycling.decoding.slowness import Reminder, why_slow

if TYPE_CHECKING:
    from token_recycling.decoding.answers import Chunk
    from token_recycling.decoding.metrics import Stats

DRAFTED = "green"


def note(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def log_lines(name: str) -> None:
    """Print what a logger says, from INFO on, on stderr, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def legend() -> None:
    """Explain the colours on stderr, if stdout shows colours."""
    out = Console()
    if out.is_terminal and not out.no_color:
        console = Console(stderr=True, highlight=False)
        console.print(Text("accepted from the draft", DRAFTED), "· written by the model")


def stream(chunks: Iterable[Chunk]) -> Chunk | None:
    """Print an answer as it is generated, with drafted tokens coloured; return the last chunk."""
    console = Console(highlight=False, soft_wrap=True)
    chunk = None
    for chunk in chunks:
        if console.is_terminal:
            console.print(Text(chunk.text, DRAFTED if chunk.from_draft else ""), end="")
        else:
            sys.stdout.write(chunk.text)
        sys.stdout.flush()
    print(flush=True)
    return chunk


def ending(last: Chunk | None, why_plain: str | None, max_tokens: int) -> None:
    """Print an answer's statistics on stderr, and whether it was cut at a length limit.

    Args:
        last: the answer's last chunk.
        why_plain: see ``DraftSize.why_plain``.
        max_tokens: the limit of ``-n``.
    """
    if last is None or last.stats is None:
        return
    if last.finish_reason == "length":
        new = last.stats.new_tokens
        limit = "the limit of -n" if new >= max_tokens else "the end of the model's context"
        note(f"cut after {new} tokens, at {limit}")
    note(statistics(last.stats))
    plainly(last.stats, why_plain)


def plainly(stats: Stats, why: str | None) -> None:
    """Print on stderr how many steps had no draft, and why, if it was more than a quarter.

    And, once an hour, that other programs make it slow.
    """
    if stats.steps and 4 * stats.plain_steps > stats.steps and why is not None:
        note(f"{stats.plain_steps} of {stats.steps} steps without a draft; {why}")
    if (line := reminder().due(why_slow(stats))) is not None:
        note(line)


@lru_cache
def reminder() -> Reminder:
    """Return what all answers of this process share."""
    return Reminder()


def statistics(stats: Stats) -> str:
    """Return the statistics of one answer as two lines."""
    total = stats.decode_seconds or 1.0
    phases = " ".join(f"{name} {seconds / total:.0%}" for name, seconds in stats.seconds.items())
    drafted = stats.drafted / stats.steps if stats.steps else 0.0
    return (
        f"{stats.new_tokens} tokens, {stats.steps} steps, MAT {stats.mat:.2f}, "
        f"{stats.tokens_per_second:.1f} tokens/s "
        f"(prompt: {stats.prompt_tokens} tokens, {stats.prefill_tokens_per_second:.0f} tokens/s)\n"
        f"drafted {drafted:.1f} per step; time: {phases}"
    )
