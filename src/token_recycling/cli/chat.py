"""`token-recycling chat`: a conversation that keeps matrix and context between turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.api import Chunk, TokenRecycling


def chat(
    model: o.Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: o.MaxTokens = defaults.MAX_NEW_TOKENS,
    temp: o.Temperature = 0.0,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.Penalty = None,
    seed: o.Seed = None,
    stop: o.StopStrings = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    tree: o.Tree = defaults.TREE,
    drafter: o.Drafter = defaults.DRAFTER,
    top_k_candidates: o.Candidates = None,
    matrix: o.Matrix = None,
    cold: o.Cold = False,
    graph: o.Graph = None,
    threads: o.Threads = None,
    strict: o.Strict = False,
) -> None:
    """Talk to a model, a line a turn. /reset begins anew, /quit or the end of input ends it.

    Ctrl-C ends an answer early.
    """
    loading = o.Loading(
        model,
        device,
        dtype,
        tree,
        drafter,
        top_k_candidates,
        matrix,
        cold,
        threads,
        strict,
        graph=graph,
    )
    options = o.sampling_options(
        max_tokens, temp, top_p, top_k, min_p, repetition_penalty, seed, stop
    )
    recycler = loading.open()
    if not getattr(recycler.tokenizer, "chat_template", None):
        raise TokenRecyclingError("this model has no chat template; use generate")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    show.legend()
    try:
        while (line := _read_line()) is not None and line != "/quit":
            if line == "/reset":
                messages = list(opening)
                recycler.reset()
                show.note("matrix and context are empty")
            elif line:
                if cold:
                    recycler.reset()
                _take_turn(recycler, messages, line, options)
    finally:
        loading.save(recycler)


def _take_turn(
    recycler: TokenRecycling, messages: list[dict[str, str]], line: str, options: dict[str, Any]
) -> None:
    """Answer ``line``; question and answer, as far as it came, join the ``messages``."""
    asked = [*messages, {"role": "user", "content": line}]
    parts: list[str] = []

    def noting(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            parts.append(chunk.text)
            yield chunk

    stats = None
    try:
        with progress.prefill_shown() as on_progress:
            chunks = recycler.stream(asked, keep_context=True, on_progress=on_progress, **options)
            stats = show.stream(noting(chunks))
    except KeyboardInterrupt:
        show.note("")
    except TokenRecyclingError as error:
        show.note(f"error: {error}; /reset begins anew")
        return
    messages[:] = [*asked, {"role": "assistant", "content": "".join(parts)}]
    if stats is not None:
        show.note(show.statistics(stats))


def _read_line() -> str | None:
    """Read a turn from stdin; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
