"""Answers of a GGUF file beside llama.cpp's: tokens per second of prompts and answers, and memory.

    pip install -r lab/llamacpp.txt            # in an environment of its own
    python lab/llamacpp.py FILE --python ENVIRONMENT/bin/python --questions QUESTIONS

Both answer the same questions in turn, with the same chat template and as many threads. Decoders
are those of the benchmark (``auto``, ``adaptive:nodes=8``), each cold at the first question;
``--speculation NGRAM_SIMPLE`` adds llama.cpp's own. The speed of an answer counts from its first
token on. Random weights answer with random tokens: give ``--lengths`` of such prompts instead of
questions, where only the cost of steps is of interest.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from script import Asked, json_lines, numbers, ratios, run, save
from token_recycling import TokenRecycling
from token_recycling.bench.variants import parse
from token_recycling.checkpoint.load import load_checkpoint
from token_recycling.util.machine import processor

WORKER = Path(__file__).parent / "llamacpp_worker.py"
WORDS = "Name a few things that one sees on a walk through an old town in the early morning. "


class LlamaCpp(Asked):
    """A process that answers with llama.cpp."""

    def __init__(self, python: Path, file: Path, threads: int, context: int, kind: str) -> None:
        super().__init__([python, WORKER, file, threads, context, kind])

    def answer(self, prompt: str | list[int], tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Return tokens per second of prompt and answer, and bytes of memory."""
        found = self.ask({"prompt": prompt, "tokens": tokens, "ignore_eos": ignore_eos})
        timings = found["timings"]
        return {
            "prompt_tokens": timings["prompt_n"],
            "prompt": timings["prompt_n"] / timings["prompt_ms"] * 1e3,
            "answer": timings["predicted_per_second"],
            "tokens": timings["predicted_n"],
            "memory": found["resident"],
            "text": found["text"],
        }

    def best(self, ids: list[int], count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens after a text, best first, with their log probabilities."""
        found: list[tuple[int, float]] = self.ask({"prompt": ids, "tokens": 1, "best": count})
        return found


def ours(recycler: TokenRecycling, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the same for a decoder of this package."""
    begin = time.perf_counter()
    first, found, text = None, [], ""
    ids = recycler.tokenizer(prompt, add_special_tokens=False).input_ids
    for chunk in recycler.stream(ids, max_new_tokens=tokens):
        first = first or time.perf_counter()
        found.append(chunk.token_id)
        text += chunk.text
    seconds = time.perf_counter() - first
    return {
        "prompt_tokens": len(ids),
        "prompt": len(ids) / (first - begin),
        "answer": (len(found) - 1) / seconds,
        "tokens": len(found),
        "ids": found,
        "text": text,
    }


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def asked(questions: Path | None, per_kind: int, lengths: str, tokenizer: Any) -> list[str]:
    """Return prompts: the first questions of each kind, and texts of these lengths in tokens."""
    prompts, kinds = [], Counter[str]()
    for question in json_lines(questions) if questions else ():
        kinds[question["kind"]] += 1
        if kinds[question["kind"]] <= per_kind:
            chat = [{"role": "user", "content": question["prompt"]}]
            template = tokenizer.apply_chat_template
            prompts.append(template(chat, tokenize=False, add_generation_prompt=True))
    for length in numbers(lengths) if lengths else ():
        ids = tokenizer(WORDS * (length // 10 + 1), add_special_tokens=False).input_ids
        prompts.append(tokenizer.decode(ids[:length]))
    return prompts


def main(
    file: Path,
    python: Annotated[Path, typer.Option(help="of the environment with xllamacpp")],
    questions: Annotated[Path | None, typer.Option(help="JSONL, as lab/questions.py makes")] = None,
    per_kind: int = 3,
    lengths: Annotated[str, typer.Option(help="tokens of prompts without meaning")] = "",
    decoders: str = "none,auto,adaptive:nodes=4,adaptive:nodes=8",
    speculation: Annotated[str, typer.Option(help="a type of llama.cpp's")] = "",
    tokens: int = 128,
    threads: int = 2,
    out: Path | None = None,
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    empty = resident()
    model, tokenizer = load_checkpoint(file)
    recyclers = {
        name: TokenRecycling(model, tokenizer, **vars(parse(name).options()))
        for name in decoders.split(",")
    }
    prompts = asked(questions, per_kind, lengths, tokenizer)
    context = 2 * (tokens + max(len(tokenizer(prompt).input_ids) for prompt in prompts))
    theirs = {"llama.cpp": LlamaCpp(python, file, threads, context, "none")}
    if speculation:
        kind = f"COMMON_SPECULATIVE_TYPE_{speculation}"
        theirs[f"llama.cpp {speculation}"] = LlamaCpp(python, file, threads, context, kind)
    rows: list[dict[str, Any]] = []
    for n, prompt in enumerate(prompts):
        row = {name: one.answer(prompt, tokens, questions is None) for name, one in theirs.items()}
        row |= {name: ours(recycler, prompt, tokens) for name, recycler in recyclers.items()}
        rows.append(row)
        rates = (f"{name} {one['answer']:.1f}" for name, one in row.items())
        print(f"{n + 1} of {len(prompts)}", *rates, flush=True)
    memory = resident() - empty
    print(f"\n{processor()}, {threads} threads, {file.name}, {len(rows)} prompts, {tokens} tokens")
    print(f"memory above an empty process: {memory / 1e6:.0f} MB, all decoders together")
    for name in theirs:
        print(f"  {name}: {rows[-1][name]['memory'] / 1e6:.0f} MB")
    for name in rows[0]:
        speed, reading, base, base_reading = (
            [row[one][part] for row in rows]
            for one in (name, "llama.cpp")
            for part in ("answer", "prompt")
        )
        print(
            f"{name:16} {median(speed):7.1f} tokens/s, {ratios(speed, base)} of llama.cpp's; "
            f"prompts {median(reading):.0f} tokens/s, {ratios(reading, base_reading)}"
        )
    for name in recyclers if "none" in recyclers else ():
        same = sum(row[name]["ids"] == row["none"]["ids"] for row in rows)
        print(f"{name}: {same} of {len(rows)} texts are those of none")
    if out:
        save(out, {"memory": memory, "rows": rows})


if __name__ == "__main__":
    run(main)
