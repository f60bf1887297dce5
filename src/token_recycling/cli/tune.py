"""`token-recycling tune`: measure step costs on this machine, by which drafts are sized."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.drafting.size.costs import CostCurve


@o.expanded(loading=("model", "device", "dtype", "float32_logits", "threads"))
def tune(
    loading: o.Loading,
    contexts: Annotated[
        str | None, typer.Option("--contexts", help="Context lengths, for example 128,1024.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Measurements per length and size.")] = 7,
    as_json: o.Json = False,
) -> None:
    """Measure step costs on this machine, by which drafts are sized.

    Times steps that verify 1, 2, 4 … 81 tokens. The result applies to this model's shape and
    dtype, the device and the number of threads. It is saved in $TOKEN_RECYCLING_CACHE, or in
    token-recycling in your cache folder.
    """
    lengths = None if contexts is None else o.numbers("--contexts", contexts)
    if rounds < 1:
        raise TokenRecyclingError(f"--rounds is {rounds}; it must be 1 or more")
    recycler = replace(loading, warm=False).open()
    from token_recycling.decoding import tune as tuning
    from token_recycling.recycler import TokenRecycling

    with progress.progress_shown("measuring") as on_progress:
        curve = tuning.measure(recycler, contexts=lengths, rounds=rounds, on_progress=on_progress)
    kept = tuning.save_curve(recycler, curve)
    begins = TokenRecycling(recycler.model, recycler.tokenizer, costs=curve, warm=False).draft_size
    size = getattr(begins, "size", 1)
    if as_json:
        print(json.dumps({**asdict(curve), "kept": kept, "begins_with": size}))
        return
    print(table(curve))
    print(f"drafts start with {size} tokens per step")
    show.note(f"saved in {kept}")


def table(curve: CostCurve) -> str:
    """Return step times by tokens verified and context: in ms, and relative to one token."""
    lines = ["tokens  " + "".join(f"{f'context {c}':>18}" for c in curve.contexts)]
    for index, size in enumerate(curve.sizes):
        cells = (f"{row[index] * 1e3:8.1f} ms {row[index] / row[0]:5.2f}x" for row in curve.seconds)
        lines.append(f"{size:6}  " + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
