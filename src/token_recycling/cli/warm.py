"""`token-recycling warm`: compute a model's warm rows and keep them in the cache folder."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from time import perf_counter
from typing import Annotated

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError


@o.expanded(loading=("model", "device", "dtype", "dequantize", "candidates", "threads"))
def warm(
    loading: o.Loading,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Most seconds to compute.")
    ] = None,
    answers: Annotated[
        int,
        typer.Option(
            "--answers", metavar="TOKENS", help="Tokens of answers to learn from; 0: none."
        ),
    ] = defaults.TAUGHT_TOKENS,
    force: Annotated[
        bool, typer.Option("--force", help="Compute everything anew, even what is kept.")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Let a model fill the rows of its whole vocabulary and answer generic questions, and keep it.

    Without this, the first answers are slower. It is saved in $TOKEN_RECYCLING_CACHE, or in
    token-recycling in your cache folder; vLLM and SGLang use it too. Another call continues where
    the last one ended, and Ctrl-C keeps what was computed.
    """
    if seconds is not None and not (isfinite(seconds) and seconds > 0):
        raise TokenRecyclingError(f"--seconds is {seconds:g}; it must be above 0")
    if answers < 0:
        raise TokenRecyclingError(f"--answers is {answers}; it must be 0 or more")
    if force and seconds is not None:
        raise TokenRecyclingError("--force replaces all kept rows; leave out --seconds")
    recycler = replace(loading, warm=False).open()
    from token_recycling.model.target import TreeTarget
    from token_recycling.warm.start import kept_rows, warm_up

    target, k = recycler.target, recycler.matrix.k
    if not isinstance(target, TreeTarget):
        raise TokenRecyclingError("this model is decoded plainly; it uses no rows")
    begun = perf_counter()
    try:
        with progress.progress_shown("tokens", seconds) as on_progress:
            found = recycler.warm_rows = warm_up(
                target,
                recycler.tokenizer,
                k,
                True if seconds is None else seconds,
                force=force,
                on_progress=on_progress,
            )
        if found is not None and found.computed and found.path is None:
            raise TokenRecyclingError(f"the rows are not kept: {found.unkept}")
        left = None if seconds is None else seconds - (perf_counter() - begun)
        if answers and (left is None or left > 0):
            with progress.progress_shown("tokens of answers", left) as on_progress:
                recycler.teach(answers, seconds=left, on_progress=on_progress)
    except KeyboardInterrupt:
        kept = kept_rows(target, recycler.tokenizer, k)
        show.note(
            f"\ninterrupted; kept: {kept.rows.rows_seen:,} of {target.vocab_size:,} tokens, "
            f"{kept.answered:,} tokens of answers"
        )
        raise
    assert found is not None
    if not found.rows.rows_seen:
        raise TokenRecyclingError("no rows were computed")
    if found.path is None:
        raise TokenRecyclingError(f"the rows are not kept: {found.unkept}")
    if as_json:
        print(
            json.dumps(
                {
                    "rows": found.rows.rows_seen,
                    "vocabulary": found.rows.vocab_size,
                    "k": found.rows.k,
                    "context": None if found.context is None else found.context.name,
                    "computed": found.computed,
                    "complete": found.complete,
                    "answered": found.answered,
                    "seconds": found.seconds,
                    "kept": str(found.path),
                }
            )
        )
        return
    print(found.line)
    if not found.complete or found.answered < answers:
        print("run it again to go on" + ("" if found.complete else "; answers come last"))
