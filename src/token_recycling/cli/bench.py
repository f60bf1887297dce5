"""`token-recycling bench`: measure the speedup for a model, a machine and a set of questions."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling.cli import completion, progress, show
from token_recycling.cli import options as o
from token_recycling.errors import INTERRUPTED, TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.bench.suites import Question
    from token_recycling.bench.tables import Table
    from token_recycling.bench.variants import Variant
    from token_recycling.recycler import TokenRecycling

TOKENS = 128
WIDE = 170  # columns of a terminal that has room for all figures


app = typer.Typer(
    help="Measure the speedup for a model, a machine and a set of questions.", rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
@o.expanded(loading=("model", "device", "dtype", "dequantize", "float32_logits", "threads"))
def bench(
    context: typer.Context,
    loading: o.Loading,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            metavar="SUITE",
            help="builtin; spec-bench=PATH, mbpp=PATH or gsm8k=PATH; or a JSONL file. Repeatable.",
        ),
    ] = None,
    per_kind: Annotated[
        int | None, typer.Option("--per-kind", help="Maximum number of questions per kind.")
    ] = None,
    decoders: Annotated[
        str | None,
        typer.Option(
            "--decoders",
            help="generate, generate-pld, auto and names of drafters, separated by commas; with "
            "settings: paper:tree=chain-8:k=4, auto:cold=yes, 'adaptive:nodes=8|16' (also "
            "matrix=FILE, prompts=none, graph=yes).",
            autocompletion=completion.decoders,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", help="Answers to each question per decoder; if sampled, of as many seeds."
        ),
    ] = 1,
    max_tokens: o.MaxTokens = TOKENS,
    temp: o.Temperature = 0.0,
    top_p: o.TopP = None,
    seed: Annotated[
        int, typer.Option("--seed", help="The seeds of all answers are drawn from this one.")
    ] = 0,
    raw: o.Raw = False,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="Folder for the results; of an interrupted run, too."),
    ] = Path("token-recycling-bench"),
) -> None:
    """Benchmark several decoders on the same questions.

    Reports the speedup of each, and writes to the folder --out: questions.jsonl and figures.csv
    with every answer, answers/*.jsonl in Spec-Bench's format, summary.json, tables.md and
    report.html. Ctrl-C ends a run early; the report is then of the questions that have been
    answered, and the same command continues the run.
    """
    if context.invoked_subcommand is not None:
        return
    from token_recycling.bench import suites
    from token_recycling.bench.variants import DEFAULT, select

    for name, given, least in (("--rounds", rounds, 1), ("-n", max_tokens, 2)):
        if given < least:
            raise TokenRecyclingError(f"{name} is {given}; it must be {least} or more")
    questions = suites.load_all(suite or ["builtin"], per_kind)
    if decoders is not None and not decoders.strip(", "):
        raise TokenRecyclingError(f"--decoders is {decoders!r}; name at least one decoder")
    specs = [spec.strip() for spec in (decoders or ",".join(DEFAULT)).split(",") if spec.strip()]
    _check_sampling(temp, top_p, seed)
    variants = select(specs)
    # Report an invalid tree or matrix before loading a model.
    most = max(variant.check() for variant in variants)
    _check_folder(out)
    if find_spec("matplotlib") is None:  # otherwise missing at the end of the run
        raise TokenRecyclingError(
            "the plots of a benchmark need matplotlib: pip install 'token-recycling[cli]'"
        )
    recycler = loading.open()
    if most > recycler.target.vocab_size:
        raise TokenRecyclingError(
            f"k is {most}; it must not exceed the vocabulary of {recycler.target.vocab_size} tokens"
        )
    settings = {
        "suites": suite or ["builtin"],
        "per_kind": per_kind,
        "max_new_tokens": max_tokens,
        "rounds": rounds,
        "temperature": temp,
        "top_p": top_p,
        "seed": seed,
        "raw": raw,
        "float32_logits": loading.float32_logits,
    }
    name = loading.model or "the bundled model"
    summary, interrupted = _run(recycler, name, questions, variants, settings, out)
    _print(summary)
    show.note(f"report: {out / 'report.html'}")
    loading.note_toy()
    if interrupted:
        raise SystemExit(INTERRUPTED)


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.")],
    second: Annotated[Path, typer.Argument(help="That of another, or the same.")],
    decoders: Annotated[
        str | None,
        typer.Option(
            "--decoders",
            help="Two names: one of the first run, and the one of the second to compare it with. "
            "Default: all that both have.",
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Compare two runs on the questions that both answered.

    Ratios are of the second run to the first, medians over questions with bootstrap intervals.
    """
    from token_recycling.bench import journal, paired

    runs = journal.read(first), journal.read(second)
    pairs = paired.pairs_of(*runs)
    here, there = (list(records[0]["variants"]) for records in runs)
    if decoders is None:
        names = [(name, name) for name in here if name in there]
    else:
        chosen = [name.strip() for name in decoders.split(",")]
        if len(chosen) != 2:
            raise TokenRecyclingError(f"--decoders is {decoders!r}; give two names, with a comma")
        names = [(chosen[0], chosen[1])]
    for one, other in names:
        for name, folder, known in ((one, first, here), (other, second, there)):
            if name not in known:
                raise TokenRecyclingError(f"{folder} has no {name}; it has {', '.join(known)}")
    if not names:
        raise TokenRecyclingError("the runs have no decoder in common; name two with --decoders")
    comparisons = [paired.compared(pairs, one, other) for one, other in names]
    if as_json:
        print(json.dumps(comparisons))
    else:
        _print_tables(paired.table(comparisons))


def _check_folder(out: Path) -> None:
    from token_recycling.bench.journal import STATE

    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise TokenRecyclingError(f"cannot write to {existing}; choose another folder for --out")
    if out.is_dir() and any(out.iterdir()) and not (out / STATE).exists():
        raise TokenRecyclingError(f"{out} is not empty; choose a new folder")


def _check_sampling(temperature: float, top_p: float | None, seed: int) -> None:
    if not (temperature == 0 or 1e-5 <= temperature <= 100):
        raise TokenRecyclingError(
            f"--temp is {temperature}; a temperature must be 0 or from 0.00001 to 100"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise TokenRecyclingError(f"--top-p is {top_p}; it must be above 0 and at most 1")
    if top_p is not None and temperature == 0:
        raise TokenRecyclingError("--top-p needs --temp above 0: greedy decoding draws nothing")
    if seed < 0:
        raise TokenRecyclingError(f"--seed is {seed}; it must be 0 or more")


def _run(
    recycler: TokenRecycling,
    name: str,
    questions: list[Question],
    variants: list[Variant],
    settings: dict[str, Any],
    out: Path,
) -> tuple[dict[str, Any], bool]:
    """Answer the questions and write all files.

    Returns:
        The summary, and whether the run was interrupted.

    Raises:
        TokenRecyclingError: ``out`` holds another run, or no question fits into the context.
    """
    from token_recycling.bench import answer_files, figures, report, runner, tables
    from token_recycling.bench.journal import Journal
    from token_recycling.bench.summary import describe_model, summarise
    from token_recycling.util.files import write_text
    from token_recycling.util.machine import describe

    tokens, raw = settings["max_new_tokens"], settings["raw"]
    fits, left_out = runner.fitting(recycler, questions, tokens, raw)
    if not fits:
        raise TokenRecyclingError(
            f"no question fits into the model's context with -n {tokens}; choose a smaller -n"
        )
    if left_out:
        show.note(f"questions skipped because they do not fit into the context: {len(left_out)}")
    asked, machine = len(fits), describe(recycler.target.device)
    model, decoders = describe_model(recycler, name), [variant.name for variant in variants]
    journal = Journal(out, fits, decoders, settings, model, machine)
    records = journal.records
    if records:
        show.note(f"continuing after {len(records)} of {asked} questions")
    chosen = ("max_new_tokens", "rounds", "seed", "raw", "temperature", "top_p")
    decoding = runner.Runner(recycler, variants, **{one: settings[one] for one in chosen})
    interrupted = False
    try:
        with progress.progress_shown("questions") as on_progress:
            decoding.run(fits, journal, on_progress)
    except KeyboardInterrupt:
        if not records:
            raise
        interrupted = True
        journal.save()
        show.note(f"interrupted: {len(records)} of {asked} questions have been answered")
    answered = fits[: len(records)]
    about = {
        "asked": asked,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "model": model,
        "settings": settings,
        "questions": [
            {"suite": q.suite, "id": q.id, "kind": q.kind, "name": q.name} for q in answered
        ],
        "left_out": [
            *(question.name for question in left_out),
            *(
                f"{question.name}, from turn {turns + 1}"
                for question, record in zip(answered, records)
                if (turns := len(record["variants"][decoders[0]]["rounds"][0]["turns"]))
                < len(question.turns)
            ),
        ],
    }
    summary = summarise(records, decoding.decoders, about=about)
    answer_files.write(records, out / "answers")
    report.write(summary, out / "report.html")
    write_text(out / "figures.csv", figures.table(records, variants))
    write_text(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(out / "tables.md", tables.document(summary))
    if not interrupted:
        journal.finish()
    return summary, interrupted


def _print(summary: dict[str, Any]) -> None:
    """Print the tables on stdout."""
    from token_recycling.bench import tables

    print(tables.headline(summary))
    overall = tables.overall(summary)
    fitting = overall if _width() >= WIDE else overall.only(*tables.NARROW)
    _print_tables(fitting, tables.by_kind(summary), tables.spec_bench(summary))
    for name, decoder in summary["decoders"].items():
        if decoder["why_plain"] is not None:
            show.note(f"{name}: {decoder['why_plain']}")


def _width() -> int:
    """Return the columns of the terminal, or as many as all tables need where there is none."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 220


def _print_tables(*contents: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Shown
    from rich.text import Text

    console = Console(width=_width())
    for content in contents:
        table = Shown(box=box.SIMPLE)
        for index, title in enumerate(content.columns):
            justify: Any = "right" if index else "left"
            table.add_column(Text(title), justify=justify, overflow="fold", no_wrap=not index)
        for row in content.rows:
            table.add_row(*map(Text, row))
        console.print(table)
