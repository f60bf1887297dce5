"""Measure vLLM or SGLang with and without the plug-in, in the environment of the engine.

    python lab/bench_serving.py --engine vllm --modes plain,ngram,chain --concurrency 1,8 \
        --suite ../shared/data/gsm8k_test.jsonl --questions 16
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoTokenizer

from engine_bench.load import WARM_UP, Load
from engine_bench.measure import check, measure, summary, table, to_dict
from script import run
from token_recycling.bench.suites import load_all
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.cli import options as o
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe

RANDOM_LENGTH = 64  # tokens of a random prompt


def main(
    engine: Annotated[str, typer.Option("--engine", help="vllm or sglang.")],
    model: o.Model = None,
    modes: Annotated[
        str,
        typer.Option(
            "--modes", help="plain, ngram, ngram_gpu and chain (vLLM only), tree; with commas."
        ),
    ] = "plain,ngram,tree",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once; several with commas.")
    ] = "1,4,16",
    rounds: Annotated[int, typer.Option("--rounds", help="Starts of the engine per mode.")] = 3,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", help="Prompts, as in bench. Repeatable.")
    ] = None,
    questions: Annotated[
        int, typer.Option("--questions", help="Prompts for each number of requests at once.")
    ] = 16,
    random: Annotated[
        bool, typer.Option("--random", help="Prompts of random tokens instead of questions.")
    ] = False,
    max_tokens: o.MaxTokens = 96,
    temp: o.Temperature = 0.0,
    chain: Annotated[int, typer.Option("--chain", help="Most drafted tokens of a chain.")] = 6,
    tree: Annotated[int, typer.Option("--tree", help="Most drafted nodes of a tree.")] = 15,
    engine_args: Annotated[
        str, typer.Option("--engine-args", help="More arguments of the engine, as JSON.")
    ] = "{}",
    options: Annotated[
        str, typer.Option("--options", help="Options of the plug-in, as JSON.")
    ] = "{}",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File for all figures, as JSON.")
    ] = None,
) -> None:
    """Serve the same prompts in several modes, restarting the engine for each in turn.

    Reports throughput, time per output token and to the first token, the time between two forwards
    (vLLM), tokens per draft, and whether the text is that of the first mode.
    """
    names = [name.strip() for name in modes.split(",") if name.strip()]
    check(engine, names)
    if rounds < 1 or questions < 1 or max_tokens < 2:
        raise TokenRecyclingError("--rounds and --questions must be 1 or more, --max-tokens 2")
    levels = _numbers("--concurrency", concurrency)
    count = WARM_UP + questions * len(levels)
    prompts = _prompts(_folder(model), suite or ["builtin"], count, random)
    load = Load(
        model=_folder(model),
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
        lengths = {"warm_up": len(load.warm_up), "prompts": len(load.prompts)}
        asked = {**vars(load), **lengths, "mode": names}
        text = json.dumps({**about, "load": asked, "rows": rows, "passes": to_dict(found)})
        write_text(out, text + "\n")


def _folder(model: str | None) -> str:
    return str(BUNDLED_MODEL) if model is None else model


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TokenRecyclingError(f"{name} is not a JSON object: {text}")
    return value


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise TokenRecyclingError(f"{name} is {text!r}; give whole numbers from 1 on, with commas")
    return numbers


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


if __name__ == "__main__":
    run(lambda: typer.run(main))
