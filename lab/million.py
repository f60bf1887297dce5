"""Count the tokens that drafts change: random prompts, options, batches, chats and a server.

    python lab/million.py run --text ../shared/data/books.txt.xz --out lab/results/million.jsonl \\
        [--model MODEL] [--dtype bfloat16] [--tokens 100000]
    python lab/million.py show lab/results/million.jsonl

A case has up to eight prompts, options and a size of drafts, all of them random. It is decoded with
drafts: one by one, in a batch, as the turns of a chat whose context is kept, or by the server's
engine, which answers all at once; and without drafts: one by one, or in the same turns. A line of
the output is a case. A run that was interrupted goes on
behind the last line of its model and dtype. Exit code 1: tokens differ.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import script
from script import json_lines, read_text
from token_recycling import TokenRecycling, load_checkpoint
from token_recycling.hf.call import CallOptions
from token_recycling.server.engine import Engine
from token_recycling.server.errors import ApiError
from token_recycling.server.job import Answer, Job, NewTokens
from token_recycling.server.metrics import Metrics
from token_recycling.server.prefixes import PrefixCaches
from token_recycling.server.scopes import MatrixScopes

app = typer.Typer(pretty_exceptions_enable=False)
KINDS = ("alone", "batch", "chat", "server")
SIZES = (None, 1, 3, 7, 15, 31, 40, 80)  # nodes of a draft; None: automatic
PROMPTS, TURNS = 8, 3
SHORT, LONG = 300, 4000  # tokens of a prompt, and of one in twenty
Answers = list[list[int]]


class Case:
    """A case: everything but the model follows from its number."""

    def __init__(self, number: int, ids: list[int], context: int) -> None:
        draw = random.Random(number)
        self.kind, self.seed = KINDS[number % len(KINDS)], number
        self.nodes = draw.choice(SIZES)
        self.temperature = draw.choice((0.0, 0.0, 0.7, 1.0))
        self.penalty = draw.choice((1.0, 1.0, 1.2))
        self.length = draw.randint(32, 128)
        room = context - TURNS * (self.length + SHORT)
        self.prompts = []
        for _ in range(TURNS if self.kind == "chat" else draw.randint(1, PROMPTS)):
            most = min(LONG, room) if draw.random() < 0.05 else SHORT
            begin, tokens = draw.randrange(len(ids) - most), draw.randint(1, most)
            self.prompts.append(ids[begin : begin + tokens])

    def options(self, row: int = 0) -> dict[str, Any]:
        """Return the options of a call that draws like this row of a batch."""
        sampling = {"temperature": self.temperature, "seed": self.seed + row}
        return {
            "max_new_tokens": self.length,
            "repetition_penalty": self.penalty,
            **sampling,
        }


def one_by_one(recycler: TokenRecycling, case: Case) -> Answers:
    return [
        recycler.generate(prompt, **case.options(row)).token_ids
        for row, prompt in enumerate(case.prompts)
    ]


def in_a_batch(recycler: TokenRecycling, case: Case) -> Answers:
    return [one.token_ids for one in recycler.generate(case.prompts, **case.options())]


def in_turns(recycler: TokenRecycling, case: Case) -> Answers:
    text: list[int] = []
    answers = []
    for turn in case.prompts:
        text = text + turn
        answer = recycler.generate(text, keep_context=True, **case.options()).token_ids
        answers.append(answer)
        text = text + answer
    return answers


def by_the_engine(recycler: TokenRecycling, case: Case) -> Answers:
    """Answer all prompts at once, each read from its beginning."""
    answers: Answers = [[] for _ in case.prompts]

    def receive(row: int, event: Any) -> None:
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, NewTokens):
            answers[row] += event.tokens

    scopes = MatrixScopes(recycler.drafter, "shared")
    limits = {"most_rows": PROMPTS, "most_waiting": PROMPTS}
    engine = Engine(recycler, Metrics("million"), scopes, PrefixCaches(0), **limits)
    jobs = []
    for row, prompt in enumerate(case.prompts):
        given = case.options(row)
        processors = {"repetition_penalty": given.pop("repetition_penalty")}
        answer = Answer(prompt, CallOptions(**given), processors)
        jobs.append(Job(answer, "", "", partial(receive, row)))
    engine.submit(jobs)
    engine.stop()  # takes no more jobs; ``run`` ends after these
    engine.run()
    return answers


def differing(wanted: Answers, found: Answers) -> int:
    """Return the tokens behind the first one that differs, in all answers."""
    count = 0
    for right, other in zip(wanted, found, strict=True):
        same = next((n for n, pair in enumerate(zip(right, other)) if pair[0] != pair[1]), None)
        if same is None and len(right) != len(other):
            same = min(len(right), len(other))
        count += 0 if same is None else max(len(right), len(other)) - same
    return count


@app.command()
def run(
    text: Annotated[Path, typer.Option(help="Compressed text that prompts are taken from.")],
    out: Annotated[Path, typer.Option(help="JSON lines.")],
    model: str | None = None,
    dtype: str = "float32",
    tokens: int = 100_000,
    threads: int = 2,
) -> None:
    """Decode cases until so many tokens of this model and dtype have been compared."""
    torch.set_num_threads(threads)
    name = Path(model).name if model else "bundled"
    about = {"model": name, "dtype": dtype}
    lines = json_lines(out) if out.exists() else []
    done = [line for line in lines if about.items() <= line.items()]
    compared, number = sum(line["tokens"] for line in done), len(done)
    loaded, tokenizer = load_checkpoint(model, "cpu", dtype)
    ids = tokenizer(read_text(text)[: 2**21]).input_ids
    plain = TokenRecycling(loaded, tokenizer, drafter="none")
    recyclers = {n: TokenRecycling(loaded, tokenizer, nodes=n) for n in SIZES}
    context = plain.target.max_context or 2 * LONG
    ways = dict(zip(KINDS, (one_by_one, in_a_batch, in_turns, by_the_engine)))
    wrong = 0
    while compared < tokens:
        case = Case(number, ids, context)
        wanted = (in_turns if case.kind == "chat" else one_by_one)(plain, case)
        differ = differing(wanted, ways[case.kind](recyclers[case.nodes], case))
        line = {
            **about,
            "case": number,
            "kind": case.kind,
            "rows": len(case.prompts),
            "nodes": case.nodes,
            "temperature": case.temperature,
            "repetition_penalty": case.penalty,
            "prompt_tokens": max(map(len, case.prompts)),
            "tokens": sum(map(len, wanted)),
            "differing": differ,
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        number, compared, wrong = number + 1, compared + line["tokens"], wrong + differ
        print(f"{compared} of {tokens} tokens, {wrong} differ", end="\r", file=sys.stderr)
    show(out)
    if wrong:
        raise typer.Exit(1)


@app.command()
def show(out: Path) -> None:
    """Print the tokens compared and those that differ, by model, dtype and kind."""
    totals: Counter[tuple[str, ...]] = Counter()
    wrong: Counter[tuple[str, ...]] = Counter()
    for line in json_lines(out):
        for key in ((line["model"], line["dtype"], line["kind"]), ("all",)):
            totals[key] += line["tokens"]
            wrong[key] += line["differing"]
    for key, count in sorted(totals.items()):
        print(f"{', '.join(key):50} {count:9} tokens, {wrong[key]} differ")


if __name__ == "__main__":
    script.run(app)
