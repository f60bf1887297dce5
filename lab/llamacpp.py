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

import json
import subprocess
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer

from token_recycling import TokenRecycling
from token_recycling.bench.variants import parse
from token_recycling.checkpoint.load import load_checkpoint
from token_recycling.util.machine import processor

WORKER = Path(__file__).parent / "llamacpp_worker.py"
WORDS = "Name a few things that one sees on a walk through an old town in the early morning. "


class LlamaCpp:
    """A process that answers with llama.cpp."""

    def __init__(self, python: Path, file: Path, threads: int, context: int, kind: str) -> None:
        command = [str(python), str(WORKER), str(file), str(threads), str(context), kind]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)

    def answer(self, prompt: str | list[int], tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Return tokens per second of prompt and answer, and bytes of memory."""
        found = self._ask(prompt=prompt, tokens=tokens, ignore_eos=ignore_eos)
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
        return self._ask(prompt=ids, tokens=1, best=count)

    def _ask(self, **asked: Any) -> Any:
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


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
    recyclers = {}
    for name in decoders.split(","):
        recyclers[name] = TokenRecycling(model, tokenizer, **vars(parse(name).options()))
    prompts = []
    if questions is not None:
        kinds: dict[str, int] = {}
        for line in questions.read_text("utf-8").splitlines():
            question = json.loads(line)
            kind, turn = question["kind"], question["prompt"]
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= per_kind:
                chat = [{"role": "user", "content": turn}]
                prompts.append(
                    tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                )
    for length in filter(None, lengths.split(",")):
        ids = tokenizer(WORDS * (int(length) // 10 + 1), add_special_tokens=False).input_ids
        prompts.append(tokenizer.decode(ids[: int(length)]))
    context = 2 * (tokens + max(len(tokenizer(prompt).input_ids) for prompt in prompts))
    kinds_of = {"llama.cpp": "none"}
    if speculation:
        kinds_of[f"llama.cpp {speculation}"] = f"COMMON_SPECULATIVE_TYPE_{speculation}"
    theirs = {
        name: LlamaCpp(python, file, threads, context, kind) for name, kind in kinds_of.items()
    }
    ignore = questions is None
    rows: list[dict[str, Any]] = []
    for n, prompt in enumerate(prompts):
        row = {name: one.answer(prompt, tokens, ignore) for name, one in theirs.items()}
        for name, recycler in recyclers.items():
            row[name] = ours(recycler, prompt, tokens)
        rows.append(row)
        print(
            f"{n + 1} of {len(prompts)}",
            *(f"{name} {one['answer']:.1f}" for name, one in row.items()),
            flush=True,
        )
    memory = resident() - empty
    print(f"\n{processor()}, {threads} threads, {file.name}, {len(rows)} prompts, {tokens} tokens")
    print(f"memory above an empty process: {memory / 1e6:.0f} MB, all decoders together")
    for name in theirs:
        print(f"  {name}: {rows[-1][name]['memory'] / 1e6:.0f} MB")
    for name in rows[0]:
        ratios = [row[name]["answer"] / row["llama.cpp"]["answer"] for row in rows]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        prompt = median(row[name]["prompt"] / row["llama.cpp"]["prompt"] for row in rows)
        print(
            f"{name:16} {median(row[name]['answer'] for row in rows):7.1f} tokens/s,"
            f" {middle:.2f} of llama.cpp's ({low:.2f} to {high:.2f});"
            f" prompts {median(row[name]['prompt'] for row in rows):.0f} tokens/s, {prompt:.2f}"
        )
    plain = [row["none"]["ids"] for row in rows] if "none" in recyclers else []
    for name in recyclers:
        if plain and name != "none":
            same = sum(row[name]["ids"] == ids for row, ids in zip(rows, plain))
            print(f"{name}: {same} of {len(rows)} texts are those of none")
    if out:
        out.write_text(json.dumps({"memory": memory, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    typer.run(main)
