"""`token-recycling matrix`: show, merge and teach matrix files."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import progress, show
from token_recycling.errors import TokenRecyclingError, printable
from token_recycling.util.tokens import NO_TOKEN

if TYPE_CHECKING:
    from token_recycling.drafting.matrix import AdjacencyMatrix

app = typer.Typer(help="Show, merge and teach matrix files.", rich_markup_mode=None)


@app.command("show")
def show_file(
    file: Annotated[Path, typer.Argument(help="A matrix file.")],
    token: Annotated[
        list[int] | None, typer.Option("--token", help="Show the row of this token id. Repeatable.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Show the rows of the tokens of this text.")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", help="Show the first rows that are filled, so many.")
    ] = 0,
    model: o.Model = None,
    as_json: o.Json = False,
) -> None:
    """Show the contents of a matrix file; rows with the text of tokens, if -m names their model."""
    from token_recycling.drafting.matrix import AdjacencyMatrix

    matrix = AdjacencyMatrix.load(file)
    for token_id in token or ():
        if not 0 <= token_id < matrix.vocab_size:
            raise TokenRecyclingError(f"--token is {token_id}; choose 0 to {matrix.vocab_size - 1}")
    shown, tokenizer = list(token or ()), None
    if shown or text or rows:
        tokenizer = _tokenizer_of(matrix, model)
    if text:
        if tokenizer is None:
            raise TokenRecyclingError("--text needs the tokenizer of the matrix; give -m MODEL")
        shown += tokenizer(text, add_special_tokens=False).input_ids
    if rows > 0:
        shown += (matrix.candidates[:, 0] != NO_TOKEN).nonzero()[:rows, 0].tolist()
    contents = {str(t): _row(matrix, t, tokenizer) for t in dict.fromkeys(shown)}
    about = {
        "vocabulary": matrix.vocab_size,
        "k": matrix.k,
        "rows_seen": matrix.rows_seen,
        "pairs": matrix.pairs,
        "pairs_seen": matrix.pairs_seen,
        "triples": matrix.triples,
        "triples_seen": matrix.triples_seen,
        "evidence": float(matrix.evidence[1].sum()),
        "bytes": matrix.nbytes,
        "fingerprint": matrix.fingerprint,
        "rows": contents,
    }
    if as_json:
        print(json.dumps(about))
        return
    print(
        f"{matrix.rows_seen} of {matrix.vocab_size} tokens have a row of k={matrix.k} candidates, "
        f"{matrix.pairs_seen} of at most {matrix.pairs} token pairs, "
        f"{matrix.triples_seen} of at most {matrix.triples} triples; "
        f"{matrix.evidence[1].sum():.0f} candidates counted; "
        f"{matrix.nbytes} bytes; tokenizer {printable(matrix.fingerprint) or 'unknown'}"
    )
    for row in contents.values():
        candidates = [
            f"{_name(one)} {one['probability']:.2f}" if one["probability"] else _name(one)
            for one in row["candidates"]
        ]
        print(f"{_name(row)}: {', '.join(candidates) or 'no row'}")


def _tokenizer_of(matrix: AdjacencyMatrix, model: str | None) -> Any:
    """Return the tokenizer of a matrix; None if it is not the bundled one and ``model`` is None.

    Raises:
        TokenRecyclingError: ``model`` has another one.
    """
    from token_recycling.checkpoint.load import load_tokenizer
    from token_recycling.drafting.matrix import fingerprint

    tokenizer = load_tokenizer(model)
    if fingerprint(tokenizer, matrix.vocab_size) == matrix.fingerprint:
        return tokenizer
    if model is not None:
        raise TokenRecyclingError(f"{model} has another tokenizer than the model of this matrix")
    return None


def _row(matrix: AdjacencyMatrix, token: int, tokenizer: Any) -> dict[str, Any]:
    """Return a row's token and candidates, best first, with their probabilities, or 0."""
    pairs = zip(matrix.candidates[token].tolist(), matrix.probabilities[token].tolist())

    def named(one: int) -> dict[str, Any]:
        return {"id": one, "text": None if tokenizer is None else tokenizer.decode([one])}

    filled = [{**named(one), "probability": p} for one, p in pairs if one != NO_TOKEN]
    return {**named(token), "candidates": filled}


def _name(one: dict[str, Any]) -> str:
    """Return a token's id, and its text if that is known."""
    text = one["text"]
    return str(one["id"]) if text is None else f"{printable(json.dumps(text))} ({one['id']})"


@app.command("merge")
def merge(
    first: Annotated[Path, typer.Argument(help="A matrix file; preferred where scores are equal.")],
    second: Annotated[Path, typer.Argument(help="A matrix file of the same model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the merged matrix.")],
) -> None:
    """Merge two matrix files into a third."""
    from token_recycling.drafting.matrix import AdjacencyMatrix

    merged = AdjacencyMatrix.load(first).merge(AdjacencyMatrix.load(second))
    merged.save(out)
    print(f"wrote {printable(out)}: {merged.rows_seen} of {merged.vocab_size} tokens have a row")


@app.command("teach")
@o.expanded(loading=("model", "device", "dtype", "dequantize", "k", "threads"))
def teach(
    loading: o.Loading,
    file: Annotated[Path, typer.Argument(help="A matrix file: extended if it exists.")],
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens of answers to learn from.")
    ] = defaults.TAUGHT_TOKENS,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Learn for at most so long.")
    ] = None,
) -> None:
    """Let a model answer generic questions, and save what its answers teach.

    With --matrix FILE, first answers are then drafted as well as later ones. Ctrl-C saves what was
    learnt so far.
    """
    if seconds is not None and not (isfinite(seconds) and seconds > 0):
        raise TokenRecyclingError(f"--seconds is {seconds:g}; it must be above 0")
    if tokens < 1:
        raise TokenRecyclingError(f"--tokens is {tokens}; it must be 1 or more")
    recycler = replace(loading, matrix=file).open()
    matrix = recycler.matrix

    def save() -> None:
        matrix.save(file)
        seen, size = matrix.rows_seen, matrix.vocab_size
        show.note(f"wrote {printable(file)}: {seen} of {size} tokens have a row")

    try:
        with progress.progress_shown("tokens of answers", seconds) as on_progress:
            recycler.teach(tokens, seconds=seconds, on_progress=on_progress)
    except KeyboardInterrupt:
        save()
        raise
    save()
