"""`token-recycling bench`: measure the speedup for a model, a machine and a set of questions."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from token_recycling.cli import completion, progress, show
from token_recycling.cli import options as o
from token_recycling.errors import INTERRUPTED, TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.bench.suites import Question
    from token_recycling.bench.variants import Variant
    from token_recycling.recycler import TokenRecycling

TOKENS = 128
WIDE = 170  # columns of a terminal that has room for all figures


@o.expanded(loading=("model", "device", "dtype", "dequantize", "float32_logits", "threads"))
def bench(
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
            "settings: paper:tree=chain-8:k=4, adaptive:nodes=8 (also matrix=FILE, graph=yes).",
            autocompletion=completion.decoders,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Runs of each question per decoder.")] = 1,
    max_tokens: o.MaxTokens = TOKENS,
    temp: o.Temperature = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Random seed for sampling.")] = 0,
    cold: Annotated[
        bool,
        typer.Option("--cold/--hot", help="Forget all text before each question, or not."),
    ] = False,
    raw: o.Raw = False,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for answers, summary and report.")
    ] = Path("token-recycling-bench"),
) -> None:
    """Benchmark several decoders on the same questions.

    Reports the speedup of each, and writes to the folder --out: answers/*.jsonl in
    Spec-Bench's format, summary.json, tables.md and report.html. Ctrl-C ends a run early; the
    report is then of the questions that have been answered.
    """
    from token_recycling.bench import suites
    from token_recycling.bench.variants import DEFAULT, select

    for name, given, least in (("--rounds", rounds, 1), ("-n", max_tokens, 2)):
        if given < least:
            raise TokenRecyclingError(f"{name} is {given}; it must be {least} or more")
    questions = suites.load_all(suite or ["builtin"], per_kind)
    if decoders is not None and not decoders.strip(", "):
        raise TokenRecyclingError(f"--decoders is {decoders!r}; name at least one decoder")
    specs = [spec.strip() for spec in (decoders or ",".join(DEFAULT)).split(",") if spec.strip()]
    _check_sampling(temp, seed)
    variants = select(specs, temperature=temp, cold=cold)
    # Report an invalid tree or matrix before loading a model.
    most = max(variant.check() for variant in variants)
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise TokenRecyclingError(f"cannot write to {existing}; choose another folder for --out")
    if out.is_dir() and any(out.iterdir()):
        raise TokenRecyclingError(f"{out} is not empty; choose a new folder")
    recycler = loading.open()
    if most > recycler.target.vocab_size:
        raise TokenRecyclingError(
            f"k is {most}; it must not exceed the vocabulary of {recycler.target.vocab_size} tokens"
        )
    run = _Run(recycler, loading.model or "the bundled model", questions, variants)
    run.settings = {
        "suites": suite or ["builtin"],
        "per_kind": per_kind,
        "max_new_tokens": max_tokens,
        "rounds": rounds,
        "start": "cold" if cold else "hot",
        "temperature": temp,
        "seed": seed,
        "raw": raw,
        "float32_logits": loading.float32_logits,
    }
    summary = run.execute(out)
    _print(summary)
    show.note(f"report: {out / 'report.html'}")
    loading.note_toy()
    if run.interrupted:
        raise SystemExit(INTERRUPTED)


def _check_sampling(temperature: float, seed: int) -> None:
    if not (temperature == 0 or 1e-5 <= temperature <= 100):
        raise TokenRecyclingError(
            f"--temp is {temperature}; a temperature must be 0 or from 0.00001 to 100"
        )
    if not 0 <= seed < 2**62:  # later turns use seed + turn
        raise TokenRecyclingError(f"--seed is {seed}; it must be a whole number below 2^62")


class _Run:
    """A benchmark run, from parsed options to result files."""

    def __init__(
        self,
        recycler: TokenRecycling,
        name: str,
        questions: list[Question],
        variants: list[Variant],
    ) -> None:
        self.recycler, self.name = recycler, name
        self.questions, self.variants = questions, variants
        self.settings: dict[str, Any] = {}
        self.interrupted = False

    def execute(self, out: Path) -> dict[str, Any]:
        """Answer the questions, write all files and return the summary."""
        from token_recycling.bench import answer_files as answers
        from token_recycling.bench import report, runner, tables
        from token_recycling.bench.summary import summarise
        from token_recycling.util.files import make_folder, write_text

        tokens, raw = self.settings["max_new_tokens"], self.settings["raw"]
        fits, left_out = runner.fitting(self.recycler, self.questions, tokens, raw)
        if not fits:
            raise TokenRecyclingError(
                f"no question fits into the model's context with -n {tokens}; choose a smaller -n"
            )
        if left_out:
            show.note(
                f"questions skipped because they do not fit into the context: {len(left_out)}"
            )
        decoding = runner.Runner(
            self.recycler,
            self.variants,
            max_new_tokens=tokens,
            rounds=self.settings["rounds"],
            seed=self.settings["seed"],
            raw=raw,
        )
        make_folder(out)
        records, asked = decoding.records, len(fits)
        try:
            with progress.progress_shown("questions") as on_progress:
                decoding.run(fits, on_progress)
        except KeyboardInterrupt:
            if not records:
                raise
            self.interrupted = True
            show.note(f"interrupted: {len(records)} of {asked} questions have been answered")
            fits = fits[: len(records)]
        about = {"asked": asked, **self._about(fits, left_out, records)}
        summary = summarise(records, decoding.decoders, about=about)
        answers.write(records, out / "answers")
        report.write(summary, out / "report.html")
        for name, text in (
            ("summary.json", json.dumps(summary, indent=1) + "\n"),
            ("tables.md", tables.document(summary)),
        ):
            write_text(out / name, text)
        return summary

    def _about(
        self, questions: list[Question], left_out: list[Question], records: list[dict[str, Any]]
    ) -> dict[str, Any]:
        from token_recycling.bench import measures
        from token_recycling.bench.summary import describe_model
        from token_recycling.util.machine import describe

        first = self.variants[0].name
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": describe(self.recycler.target.device),
            "model": describe_model(self.recycler, self.name),
            "settings": self.settings,
            "questions": [
                {"suite": q.suite, "id": q.id, "kind": q.kind, "name": q.name} for q in questions
            ],
            "left_out": [question.name for question in left_out]
            + [
                f"{question.name}, from turn {len(asked) + 1}"
                for question, record in zip(questions, records)
                if len(asked := measures.turns(record, first, 0)) < len(question.turns)
            ],
        }


def _print(summary: dict[str, Any]) -> None:
    """Print the tables on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from token_recycling.bench import tables

    known = Console().is_terminal or "COLUMNS" in os.environ
    console = Console(width=None if known else 220)
    print(tables.headline(summary))
    overall = tables.overall(summary)
    fitting = overall if console.width >= WIDE else overall.only(*tables.NARROW)
    for content in (fitting, tables.by_kind(summary), tables.spec_bench(summary)):
        table = Table(box=box.SIMPLE)
        for index, title in enumerate(content.columns):
            justify: Any = "right" if index else "left"
            table.add_column(Text(title), justify=justify, overflow="fold", no_wrap=not index)
        for row in content.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for name, decoder in summary["decoders"].items():
        if decoder["why_plain"] is not None:
            show.note(f"{name}: {decoder['why_plain']}")
