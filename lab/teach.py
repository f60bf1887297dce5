"""How the matrix grows when a model is taught by its own answers to generic prompts.

    python lab/teach.py teach --model FOLDER --out build/taught
    python lab/teach.py curve --model FOLDER --answers RECORDS.pt --taught build/taught

``teach`` writes the matrix after 1,000, 3,000, 10,000, … tokens; ``curve`` decodes recorded answers
of the checking half again, each from a copy of every matrix (see ``lab/record.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from fit import PROSE, Model, Path_, drafter, opened
from replay import Result, by_kind, mat
from token_recycling import AdjacencyMatrix, TokenRecycling
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.warm.store import WarmRows
from token_recycling.warm.teach import teach as teach_more

app = typer.Typer(help=__doc__, rich_markup_mode=None)
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)


@app.command()
def teach(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the matrices.")],
    most: Annotated[int, typer.Option(help="Tokens in all.")] = 100_000,
    rows: Annotated[Path | None, typer.Option(help="Matrix to begin with.")] = None,
    slots: Annotated[str, typer.Option(help="For pairs and triples.")] = "",
    threads: int = 2,
) -> None:
    """Answer generic prompts; write the matrix from time to time."""
    torch.set_num_threads(threads)
    recycler = TokenRecycling.from_pretrained(model, device="cpu", warm=False)
    matrix = AdjacencyMatrix(recycler.target.vocab_size, 12)
    if rows is not None:
        matrix = AdjacencyMatrix.load(rows)
    if slots:
        matrix.reserve(*map(int, slots.split(",")))
    found = WarmRows(matrix, None, None)
    out.mkdir(parents=True, exist_ok=True)
    begun = perf_counter()
    for mark in MARKS:
        if mark <= most:
            teach_more(found, recycler.target, recycler.tokenizer, tokens=mark)
            matrix.save(out / f"{mark}.safetensors")
            seconds = perf_counter() - begun
            print(
                f"{found.answered} tokens, {seconds:.0f} s, {found.answered / seconds:.0f} "
                f"tokens/s, {matrix.rows_seen} rows, {matrix.pairs_seen} pairs, "
                f"{matrix.triples_seen} triples",
                flush=True,
            )


@app.command()
def curve(
    model: Model,
    path: Path_,
    taught: Annotated[Path, typer.Option(help="Folder of matrices.")],
    sizes: str = "15,60",
    exact: bool = False,
) -> None:
    """MAT of the checking half, cold, from each matrix in the folder."""
    answers, _, check = opened(model, path)
    answers.exact = exact
    files = sorted(taught.glob("*.safetensors"), key=lambda file: int(file.stem))
    for size in map(int, sizes.split(",")):
        for file in [None, *files]:
            results: list[Result] = []
            start = None if file is None else AdjacencyMatrix.load(file)
            for one in check:
                if start is None:
                    made = drafter(answers)
                else:
                    made = AdaptiveDrafter(start.clone(), pairs=start.pairs, triples=start.triples)
                results.append(answers.replay(made, one, size))
            prose = [one for one in results if one.kind in PROSE]
            unknown = sum(r.unknown for r in results) / max(1, sum(r.nodes for r in results))
            name = "cold" if file is None else f"{int(file.stem):,}"
            kinds = json.dumps({kind: round(value, 2) for kind, value in by_kind(results).items()})
            print(
                f"{size:3} nodes, {name:>8}: MAT {mat(results):.3f}, prose {mat(prose):.3f}, "
                f"unknown {unknown:.0%}, {kinds}",
                flush=True,
            )


if __name__ == "__main__":
    app()
