"""Tokens per second of answers beside other programs that keep the processor busy.

    python lab/beside.py MODEL --busy 0,1,2,4                  the default, and one thread
    python lab/beside.py MODEL --decoders default,generate     the default, and Transformers' own
    python lab/beside.py FILE.gguf --decoders default,llama.cpp --llamacpp ENVIRONMENT/bin/python

Every decoder is a process of its own, and they answer in turn while all others wait: one question
each, then the next question. ``NAME:VARIABLE=VALUE`` runs a decoder with an environment variable,
such as ``default:OMP_WAIT_POLICY=passive`` or ``default:PYTHONPATH=/older/src``. A busy process
runs ``while True: pass``. The first five answers of a decoder are not counted, and all begin with
an empty matrix.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from llamacpp import LlamaCpp
from script import Asked, run, save
from token_recycling import TokenRecycling
from token_recycling.checkpoint.load import load_checkpoint

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "What is 12 times 7?",
    "List three fruits and their colours.",
    "How do I boil an egg?",
    "Explain what a noun is, with two examples.",
    "Who was Ada Lovelace?",
    "Give me a recipe for pancakes.",
    "Why do leaves change their colour in autumn?",
)
WARM = 5  # answers
THREADS, CONTEXT = 2, 2048  # of llama.cpp
BUSY = "while True: pass"


def worker(model: Path, decoder: str, tokens: int) -> None:
    """Answer questions from the standard input until it ends."""
    if decoder == "one-thread":
        torch.set_num_threads(1)
    dtype = "bfloat16" if "bfloat16" in model.name else None
    loaded, tokenizer = load_checkpoint(model, dtype=dtype)
    recycler = None if decoder == "generate" else TokenRecycling(loaded, tokenizer)
    for line in sys.stdin:
        chat = [{"role": "user", "content": json.loads(line)}]
        if recycler is None:
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            begin = time.perf_counter()
            out = loaded.generate(**ids, max_new_tokens=tokens, do_sample=False)
            count = out.shape[1] - ids["input_ids"].shape[1]
        else:
            recycler.reset()
            begin = time.perf_counter()
            count = len(recycler.generate(chat, max_new_tokens=tokens).token_ids)
        print(json.dumps([count, time.perf_counter() - begin]), flush=True)


class Decoder(Asked):
    """A process that answers."""

    def __init__(self, name: str, model: Path, tokens: int) -> None:
        decoder, *variables = name.split(":")
        command = [sys.executable, __file__, model, "--worker", decoder, "--tokens", tokens]
        super().__init__(command, **dict(variable.split("=", 1) for variable in variables))
        self.rate(QUESTIONS[0])  # waits until it is ready

    def rate(self, question: str) -> float:
        """Return the tokens per second of an answer, its prompt included."""
        count, seconds = self.ask(question)
        return float(count / seconds)


class Theirs(LlamaCpp):
    """The same of llama.cpp."""

    def __init__(self, model: Path, tokens: int, python: Path) -> None:
        file = model if model.is_file() else next(model.glob("*.gguf"))
        super().__init__(python, file, THREADS, CONTEXT, "none")
        self.tokens = tokens

    def rate(self, question: str) -> float:
        """Return the tokens per second of an answer, its prompt included."""
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        begin = time.perf_counter()
        count = self.answer(prompt, self.tokens, False)["tokens"]
        return float(count / (time.perf_counter() - begin))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(
    model: Path,
    busy_processes: Annotated[str, typer.Option("--busy")] = "0,1,2,4",
    decoders: str = "default,one-thread",
    tokens: int = 40,
    answers: int = 8,
    llamacpp: Annotated[Path | None, typer.Option(help="Python with xllamacpp")] = None,
    out: Path | None = None,
    is_worker: Annotated[str, typer.Option("--worker", hidden=True)] = "",
) -> None:
    """Measure."""
    if is_worker:
        worker(model, is_worker, tokens)
        return
    processes = {
        name: Theirs(model, tokens, llamacpp)
        if name == "llama.cpp"
        else Decoder(name, model, tokens)
        for name in decoders.split(",")
    }
    for question in QUESTIONS[:WARM]:
        for decoder in processes.values():
            decoder.rate(question)
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in processes}
    counts = busy_processes.split(",")
    for count in counts:
        with busy(int(count)):
            for n in range(answers):
                for name, decoder in processes.items():
                    rate = decoder.rate(QUESTIONS[1 + n % (len(QUESTIONS) - 1)])
                    rates[name].setdefault(count, []).append(rate)
        for name, by_count in rates.items():
            found = by_count[count]
            relative = median(found) / median(by_count[counts[0]])
            print(
                f"{count} busy  {name:40} {median(found):7.1f} tokens/s"
                f" ({min(found):.1f} to {max(found):.1f})  {relative:.2f} of {counts[0]} busy",
                flush=True,
            )
    for decoder in processes.values():
        decoder.process.kill()
    if out:
        save(out, {"model": model.name, "rates": rates})


if __name__ == "__main__":
    run(main)
