"""Measure vLLM or SGLang with and without the plug-in, in the environment of the engine.

    python lab/bench_serving.py --engine vllm --modes plain,ngram,chain --concurrency 1,8 \
        --suite ../shared/data/gsm8k_test.jsonl --questions 16
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoTokenizer

import engines
from engines import ENGINES, Load, Pass
from script import numbers, run, save
from skinny_kernels.errors import one_line
from token_recycling.bench.measures import quartiles
from token_recycling.bench.suites import load_all
from token_recycling.bench.tables import NOTHING, Table, markdown
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.cli import options as o
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.machine import describe

BUILTIN = ["builtin"]
LIMIT = 3600.0  # seconds of one life of an engine, after which it has failed
WARM_UP = 2  # prompts before the first pass
RANDOM_LENGTH = 64  # tokens of a random prompt


def check(engine: str, modes: Sequence[str]) -> None:
    """Check that an engine is here and has these modes.

    Raises:
        TokenRecyclingError: it is not, or has not.
    """
    if engine not in ENGINES:
        raise TokenRecyclingError(f"no such engine: {engine}; choose from {', '.join(ENGINES)}")
    known = ENGINES[engine].modes
    if unknown := [mode for mode in modes if mode not in known]:
        raise TokenRecyclingError(
            f"{engine} has no mode {unknown[0]!r}; choose from {', '.join(known)}"
        )
    if not modes:
        raise TokenRecyclingError("choose at least one mode")
    if find_spec(engine) is None:
        raise TokenRecyclingError(
            f"{engine} is not installed here; install Token Recycling beside it (docs/serving.md)"
        )


def measure(
    engine: str,
    load: Load,
    modes: Sequence[str],
    rounds: int,
    on_life: Callable[[int, str], object] = lambda turn, mode: None,
) -> dict[str, list[list[Pass]]]:
    """Serve ``load`` in every mode, ``rounds`` times; the order rotates.

    Args:
        engine: one of ``ENGINES``.
        load: its mode is replaced.
        modes: of the engine.
        rounds: lives of the engine per mode.
        on_life: called before each with (round, mode).

    Returns:
        By mode and round, a pass for each concurrency.

    Raises:
        TokenRecyclingError: see ``check``; or the engine failed, with its last line.
    """
    check(engine, modes)
    found: dict[str, list[list[Pass]]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        first = turn % len(modes)
        for mode in [*modes[first:], *modes[:first]]:
            on_life(turn, mode)
            found[mode].append(_live(engine, replace(load, mode=mode)))
    return found


def _live(engine: str, load: Load) -> list[Pass]:
    """Start the engine, serve, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "load.json", Path(folder) / "passes.json"
        asked.write_text(json.dumps(asdict(load)), encoding="utf-8")
        command = [sys.executable, engines.__file__, engine, str(asked), str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=LIMIT, env=environment
            )
            return [Pass(**one) for one in json.loads(out.read_text(encoding="utf-8"))]
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()] or ["no output"]
            causes = [line for line in lines if "Error" in line] or lines
            reason = one_line(causes[-1], 300)
        except subprocess.TimeoutExpired:
            reason = f"it took more than {LIMIT:.0f} seconds"
        raise TokenRecyclingError(f"{engine} failed in mode {load.mode}: {reason}")


def summary(found: dict[str, list[list[Pass]]]) -> list[dict[str, Any]]:
    """Return a row of figures for each mode and concurrency."""
    rows = []
    first = next(iter(found.values()))[0]
    for mode, lives in found.items():
        for reference, *passes in zip(first, *lives):
            drafts = sum(one.drafts for one in passes)
            low, middle, high = quartiles([one.rate for one in passes])
            pairs = [pair for one in passes for pair in zip(one.texts, reference.texts)]
            rows.append(
                {
                    "mode": mode,
                    "concurrency": reference.concurrency,
                    "tokens_per_second": middle,
                    "quartiles": [low, high],
                    "tokens_per_draft": 1 + sum(p.accepted for p in passes) / drafts
                    if drafts
                    else None,
                    "same_as_first_mode": sum(a == b for a, b in pairs),
                    "requests": len(pairs),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a Markdown table, a line for each mode and concurrency."""

    first = rows[0]["mode"]
    base = {r["concurrency"]: r["tokens_per_second"] for r in rows if r["mode"] == first}
    lines = []
    for row in rows:
        rate, per_draft = row["tokens_per_second"], row["tokens_per_draft"]
        lines.append(
            [
                *(row["mode"], str(row["concurrency"]), f"{rate:.0f}"),
                "{:.0f}-{:.0f}".format(*row["quartiles"]),
                f"{rate / base[row['concurrency']]:.2f}",
                NOTHING if per_draft is None else f"{per_draft:.2f}",
                f"{row['same_as_first_mode']} of {row['requests']}",
            ]
        )
    head = ["mode", "at once", "tokens/s", "quartiles", "x first", "tokens/draft", "same text"]
    return markdown(Table(head, lines))


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TokenRecyclingError(f"{name} is not a JSON object: {text}")
    return value


def _prompts(model: str, suites: list[str], count: int, random: bool) -> list[list[int]]:
    """Return ``count`` prompts as token ids."""
    if random:
        vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        draws = torch.Generator().manual_seed(0)
        shape = (count, RANDOM_LENGTH)
        return torch.randint(vocabulary, shape, generator=draws).tolist()
    found = load_all(suites)
    if len(found) < count:
        raise TokenRecyclingError(f"there are {len(found)} questions; {count} are needed")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = found[:: len(found) // count][:count]  # of all kinds
    return [
        encode(tokenizer, as_conversation(tokenizer, [question.turns[0]])) for question in chosen
    ]


def main(
    engine: Annotated[str, typer.Option(help="vllm or sglang.")],
    model: o.Model = str(BUNDLED_MODEL),
    modes: Annotated[
        str, typer.Option(help="plain, ngram, ngram_gpu and chain (vLLM only), tree; with commas.")
    ] = "plain,ngram,tree",
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(help="Starts of the engine per mode.")] = 3,
    suite: Annotated[list[str], typer.Option(help="Prompts, as in bench. Repeatable.")] = BUILTIN,
    questions: Annotated[int, typer.Option(help="Prompts for each concurrency.")] = 16,
    random: Annotated[bool, typer.Option(help="Random tokens instead of questions.")] = False,
    max_tokens: o.MaxTokens = 96,
    temp: o.Temperature = 0.0,
    chain: Annotated[int, typer.Option(help="Most drafted tokens of a chain.")] = 6,
    tree: Annotated[int, typer.Option(help="Most drafted nodes of a tree.")] = 15,
    engine_args: Annotated[str, typer.Option(help="More of the engine's, as JSON.")] = "{}",
    options: Annotated[str, typer.Option(help="Of the plug-in, as JSON.")] = "{}",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="All figures, as JSON.")] = None,
) -> None:
    """Serve the same prompts in several modes, restarting the engine for each in turn.

    Reports throughput, tokens per draft, and whether the text is that of the first mode.
    """
    names = [name.strip() for name in modes.split(",") if name.strip()]
    check(engine, names)
    if rounds < 1 or questions < 1 or max_tokens < 2:
        raise TokenRecyclingError("--rounds and --questions must be 1 or more, --max-tokens 2")
    levels = numbers(concurrency, "--concurrency")
    prompts = _prompts(model, suite, WARM_UP + questions * len(levels), random)
    load = Load(
        model=model,
        mode=names[0],
        arguments=_object("--engine-args", engine_args),
        warm_up=prompts[:WARM_UP],
        prompts=prompts[WARM_UP:],
        new_tokens=max_tokens,
        temperature=temp,
        concurrency=levels,
        chain=chain,
        tree=tree,
        options=_object("--options", options),
    )

    def on_life(turn: int, mode: str) -> None:
        typer.echo(f"round {turn + 1} of {rounds}: {engine}, {mode}", err=True)

    found = measure(engine, load, names, rounds, on_life)
    rows = summary(found)
    typer.echo(table(rows))
    if out is not None:
        about = {"machine": describe(torch.device("cpu")), "engine": engine, "rounds": rounds}
        lengths = {"warm_up": WARM_UP, "prompts": len(load.prompts), "mode": names}
        passes = {
            mode: [[vars(one) | {"texts": None} for one in life] for life in lives]
            for mode, lives in found.items()
        }
        save(out, {**about, "load": vars(load) | lengths, "rows": rows, "passes": passes})


if __name__ == "__main__":
    run(main)
