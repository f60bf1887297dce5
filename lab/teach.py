"""How the matrix grows when a model is taught by its own answers to generic prompts.

    python lab/teach.py teach --model FOLDER --out build/taught
    python lab/teach.py curve --model FOLDER --data ../shared/data --answers RECORDS.pt \\
        --taught build/taught

``teach`` writes the matrix after 1,000, 3,000, 10,000, … tokens; ``curve`` decodes recorded answers
of the checking half again, each from a copy of every matrix (see ``lab/record.py``).
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from fit import Data, Model, Path_, drafter, opened
from replay import Result, by_kind, mat
from token_recycling import AdjacencyMatrix, TokenRecycling
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.warm.prompts import prompts

app = typer.Typer(help=__doc__, rich_markup_mode=None)
MARKS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
PROSE = ("writing", "roleplay", "reasoning", "stem", "humanities", "coding")


@app.command()
def teach(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the matrices.")],
    rows: Annotated[int, typer.Option(help="Answers at once.")] = 16,
    tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 128,
    most: Annotated[int, typer.Option(help="Tokens in all.")] = 100_000,
    temperatures: Annotated[str, typer.Option(help="In turn; 0: greedy.")] = "0,0.7,1",
    warm: Annotated[bool, typer.Option(help="Begin with the warm rows that are kept.")] = False,
    slots: Annotated[str, typer.Option(help="For pairs and triples.")] = "",
    threads: int = 2,
) -> None:
    """Answer generic prompts in batches; write the matrix from time to time."""
    torch.set_num_threads(threads)
    recycler = TokenRecycling.from_pretrained(model, device="cpu", warm=None if warm else False)
    if slots:
        pairs, triples = map(int, slots.split(","))
        made = AdaptiveDrafter(
            AdjacencyMatrix(recycler.target.vocab_size, 12), pairs=pairs, triples=triples
        )
        recycler = TokenRecycling(recycler.model, recycler.tokenizer, drafter=made, nodes=4)
    out.mkdir(parents=True, exist_ok=True)
    asked, begun, done, marks = prompts(), perf_counter(), 0, [m for m in MARKS if m <= most]
    for number in range(1_000_000):
        batch = [[{"role": "user", "content": one}] for one in islice(asked, rows)]
        chosen = [float(t) for t in temperatures.split(",")]
        answers = recycler.generate(
            batch,
            max_new_tokens=tokens,
            temperature=chosen[number % len(chosen)],
            seed=number,
        )
        assert isinstance(answers, list)
        done += sum(len(answer.token_ids) for answer in answers)
        while marks and done >= marks[0]:
            path = out / f"{marks.pop(0)}.safetensors"
            recycler.matrix.save(path)
            seconds = perf_counter() - begun
            print(path, done, f"tokens, {seconds:.0f} s, {done / seconds:.0f} tokens/s", flush=True)
        if not marks:
            return


@app.command()
def curve(
    model: Model,
    data: Data,
    path: Path_,
    taught: Annotated[Path, typer.Option(help="Folder of matrices.")],
    sizes: str = "15,60",
    exact: bool = False,
) -> None:
    """MAT of the checking half, cold, from each matrix in the folder."""
    answers, _, check = opened(model, path, data)
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
