"""`token-recycling warm`: compute a model's warm rows and keep them in the cache folder."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from typing import Annotated

import typer

from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError


@o.expanded(loading=("model", "device", "dtype", "candidates", "threads"))
def warm(
    loading: o.Loading,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Most seconds to compute.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compute all rows, even those that are kept.")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Let a model fill the rows of its whole vocabulary, and keep them for later runs.

    Without these rows the first answers are slower. They are saved in $TOKEN_RECYCLING_CACHE, or
    in token-recycling in your cache folder; vLLM and SGLang use them too. A call with --seconds
    continues where the last one ended.
    """
    if seconds is not None and not (isfinite(seconds) and seconds > 0):
        raise TokenRecyclingError(f"--seconds is {seconds:g}; it must be above 0")
    if force and seconds is not None:
        raise TokenRecyclingError("--force replaces all kept rows; leave out --seconds")
    recycler = replace(loading, warm=False).open()
    from token_recycling.model.target import TreeTarget
    from token_recycling.warm.start import kept_rows, warm_up

    target = recycler.target
    if not isinstance(target, TreeTarget):
        raise TokenRecyclingError("this model is decoded plainly; it uses no rows")
    try:
        with progress.progress_shown("tokens") as on_progress:
            found = warm_up(
                target,
                recycler.tokenizer,
                recycler.matrix.k,
                True if seconds is None else seconds,
                force=force,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        kept = kept_rows(target, recycler.tokenizer, recycler.matrix.k)
        show.note(f"\ninterrupted; kept: {kept.rows.rows_seen:,} of {target.vocab_size:,} tokens")
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
                    "context": found.context,
                    "computed": found.computed,
                    "complete": found.complete,
                    "seconds": found.seconds,
                    "kept": str(found.path),
                }
            )
        )
        return
    print(found.line)
