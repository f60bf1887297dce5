"""The server under load: errors, memory, second turns, and beside `transformers serve`.

make build/clients/ready  # what `transformers serve` needs
PYTHONPATH=build/clients python lab/measure_server.py [--minutes 10] [--rounds 3] [--out FILE]

1. Second turns: time to the first token of a conversation of some 1,500 tokens, first and second
   turn, over one connection.
2. Load: 200 questions of GSM8K over and over at concurrency 16; status codes, memory each
   10 seconds.
3. Side by side: the questions once per server and round, in turn, at concurrency 1 and 16, with
   this server and `transformers serve` (plain, plain with continuous batching, and with the recipe
   of docs/transformers.md). All servers run; only one of them has requests at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx2 as httpx
import torch
import typer

from script import json_lines, run, save
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.util.machine import describe

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build"
QUESTIONS, AT_ONCE, TOKENS = 200, 16, 96
SETTLED = 60.0  # seconds after which memory should not grow
STORY = "The cat sat on the mat, and the dog ran to the door. "
RECIPE = ROOT / "build" / "serve" / "recipe.py"  # its folder is on its path


def recipe() -> str:
    """The program in docs/transformers.md."""
    text = (ROOT / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if "ModelManager" in block)


def commands(threads: int) -> dict[str, list[str]]:
    """The servers, without --port."""
    stock = "from transformers.cli.transformers import main; main()"
    limited = f"import torch; torch.set_num_threads({threads}); "
    serve = ["serve", "--device", "cpu", "--dtype", "float32"]
    RECIPE.parent.mkdir(parents=True, exist_ok=True)
    RECIPE.write_text(limited + "\n" + recipe())
    plain = [sys.executable, "-c", limited + stock, *serve]
    own = [str(Path(sys.executable).with_name("token-recycling")), "serve", f"--threads={threads}"]
    return {
        "token-recycling": [*own, "--served-model-name", str(BUNDLED_MODEL)],
        "transformers": plain,
        "transformers, continuous batching": [*plain, "--continuous-batching"],
        "transformers, recipe": [sys.executable, str(RECIPE), *serve],
    }


@contextmanager
def served(command: list[str], log: Path):
    """Start a server; yield its process and URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise SystemExit(f"{command[-1]} has ended:\n{log.read_text()}")
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code < 500:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def memory(process: subprocess.Popen) -> float:
    """MiB of resident memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


async def ask(client: httpx.AsyncClient, question: str) -> tuple[int, int, str]:
    """Return status, tokens and text of an answer."""
    body = {
        "model": str(BUNDLED_MODEL),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, 0, ""
    found = answer.json()
    text = found["choices"][0]["message"]["content"]
    return 200, found["usage"]["completion_tokens"], text


async def load(
    url: str, questions: list[str], at_once: int, seconds: float = 0.0, process: Any = None
) -> dict[str, Any]:
    """Ask all questions once, or again and again for so many seconds."""
    statuses, texts, tokens, marks = Counter(), {}, [], []
    begin = time.monotonic()

    def passed() -> float:
        return time.monotonic() - begin

    def queue() -> Iterator[tuple[int, str]]:
        yield from enumerate(questions)
        while passed() < seconds:
            yield from enumerate(questions)

    waiting, limits = queue(), httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work() -> None:
            for index, question in waiting:
                status, count, texts[index] = await ask(client, question)
                statuses[status] += 1
                tokens.append(count)
                if seconds and passed() >= seconds:
                    return

        async def watch() -> None:
            while process:
                marks.append([round(passed(), 1), round(memory(process), 1)])
                await asyncio.sleep(10)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(work() for _ in range(at_once)))
        watching.cancel()
    taken = passed()
    return {
        "seconds": taken,
        "statuses": dict(statuses),
        "tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / taken,
        "memory": marks,
        "texts": texts,
    }


def turns(url: str, count: int = 9) -> dict[str, Any]:
    """Time to the first token of first and second turns, in milliseconds."""
    times: dict[str, list[float]] = {"first": [], "second": []}
    with httpx.Client(base_url=url, timeout=100) as client:

        def first_token(*turns: str) -> tuple[float, str]:
            roles = ("user", "assistant", "user")
            chat = [{"role": role, "content": text} for role, text in zip(roles, turns)]
            body = {"messages": chat, "max_tokens": 60, "temperature": 0, "stream": True}
            begin, first, answer = time.perf_counter(), 0.0, ""
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        delta = json.loads(line[6:])["choices"][0]["delta"]
                        answer += delta.get("content") or ""
                        if answer and not first:
                            first = time.perf_counter() - begin
            return 1000 * first, answer

        first_token("Hello")
        for number in range(count):
            story = f"Story {number}. {STORY * 103}"
            taken, text = first_token(story)
            times["first"].append(taken)
            times["second"].append(first_token(story, text, "And then?")[0])
    ratios = [later / first for first, later in zip(times["first"], times["second"], strict=True)]
    return {**times, "ratio": median(ratios), "ratios": ratios}


def alone(command: list[str], questions: list[str], minutes: float) -> dict[str, Any]:
    """Return second turns and load of one server."""
    with served(command, LOGS / "serve.log") as (process, url):
        result = {"turns": turns(url)}
        print("second turn / first turn", round(result["turns"]["ratio"], 3), flush=True)
        found = asyncio.run(load(url, questions, AT_ONCE, 60 * minutes, process))
    del found["texts"]
    settled = [size for at, size in found["memory"] if at >= SETTLED]
    result["load"] = found | {"growth": max(settled) / settled[0] - 1 if settled else None}
    print({k: v for k, v in result["load"].items() if k != "memory"}, flush=True)
    return result


def side_by_side(
    programs: dict[str, list[str]], questions: list[str], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return tokens per second of all servers, in turn, by name and requests at once."""
    speeds: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(served(command, LOGS / f"serve-{number}.log"))[1]
            for number, (name, command) in enumerate(programs.items())
        }
        for number, at_once in product(range(rounds), (1, AT_ONCE)):
            own = questions if at_once > 1 else questions[:40]
            texts: dict[int, str] = {}
            for name, url in running.items():
                found = asyncio.run(load(url, own, at_once))
                texts = texts or found["texts"]
                same = sum(texts[index] == text for index, text in found["texts"].items())
                entry = {name: found[name] for name in ("tokens_per_second", "statuses")}
                entry["same_texts"] = [same, len(own)]
                speeds.setdefault(f"{name} at {at_once}", []).append(entry)
                print(number, at_once, name, entry, flush=True)
    return speeds


def main(
    minutes: Annotated[float, typer.Option(help="of load; 0: only side by side")] = 10,
    rounds: int = 3,
    threads: int = 2,
    data: Annotated[Path, typer.Option(help="folder of GSM8K")] = ROOT.parent / "shared" / "data",
    out: Path = ROOT / "lab/results/server-bundled.json",
) -> None:
    """Measure."""
    lines = json_lines(data / "gsm8k_test.jsonl")[:QUESTIONS]
    questions = [line["question"] for line in lines]
    programs = commands(threads)
    result = {
        "machine": describe(torch.device("cpu")),
        "tokens": TOKENS,
        "questions": QUESTIONS,
        **(alone(programs["token-recycling"], questions, minutes) if minutes else {}),
        "side_by_side": side_by_side(programs, questions, rounds),
    }
    save(out, result)


if __name__ == "__main__":
    run(main)
