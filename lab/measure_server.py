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

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx
import torch

from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe

ROOT = Path(__file__).parents[1]
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
    own = [
        str(Path(sys.executable).with_name("token-recycling")),
        "serve",
        "--threads",
        str(threads),
    ]
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
    url: str, questions: list[str], at_once: int, seconds: float = 0.0, process=None
) -> dict:
    """Ask all questions once, or again and again for so many seconds."""
    statuses, texts, tokens, marks = Counter(), {}, 0, []
    limits = httpx.Limits(max_connections=at_once)
    begin = time.monotonic()

    def queue():
        while True:
            yield from enumerate(questions)
            if time.monotonic() - begin >= seconds:
                return

    waiting = queue()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work() -> None:
            nonlocal tokens
            for index, question in waiting:
                status, count, text = await ask(client, question)
                statuses[status] += 1
                tokens += count
                texts[index] = text
                if seconds and time.monotonic() - begin >= seconds:
                    return

        async def watch() -> None:
            while True:
                marks.append([round(time.monotonic() - begin, 1), round(memory(process), 1)])
                await asyncio.sleep(10)

        watching = asyncio.ensure_future(watch()) if process else None
        await asyncio.gather(*(work() for _ in range(at_once)))
        if watching:
            watching.cancel()
    taken = time.monotonic() - begin
    return {
        "seconds": taken,
        "statuses": dict(statuses),
        "tokens": tokens,
        "tokens_per_second": tokens / taken,
        "memory": marks,
        "texts": texts,
    }


def turns(url: str, count: int = 9) -> dict:
    """Time to the first token of first and second turns, in milliseconds."""
    times = {"first": [], "second": []}
    with httpx.Client(base_url=url, timeout=100) as client:

        def first_token(messages: list[dict]) -> tuple[float, str]:
            body = {
                "messages": messages, "max_tokens": 60, "temperature": 0, "stream": True,
            }  # fmt: skip
            begin, first, text = time.perf_counter(), None, ""
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
                        if piece:
                            first = first or time.perf_counter() - begin
                            text += piece
            return 1000 * first, text

        first_token([{"role": "user", "content": "Hello"}])
        for number in range(count):
            messages = [{"role": "user", "content": f"Story {number}. {STORY * 103}"}]
            taken, text = first_token(messages)
            times["first"].append(taken)
            more = [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And then?"},
            ]
            times["second"].append(first_token(messages + more)[0])
    ratios = [later / first for first, later in zip(times["first"], times["second"], strict=True)]
    return {**times, "ratio": statistics.median(ratios), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=ROOT / "lab/results/server-bundled.json")
    given = parser.parse_args()
    lines = (given.data / "gsm8k_test.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines[:QUESTIONS]]
    result: dict = {
        "machine": describe(torch.device("cpu")),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    }
    programs = commands(given.threads)
    logs = ROOT / "build"
    if given.minutes:
        with served(programs["token-recycling"], logs / "serve.log") as (process, url):
            result["turns"] = turns(url)
            print("second turn / first turn", round(result["turns"]["ratio"], 3), flush=True)
            found = asyncio.run(load(url, questions, AT_ONCE, 60 * given.minutes, process))
            settled = [size for at, size in found["memory"] if at >= SETTLED]
            found |= {"growth": max(settled) / settled[0] - 1 if settled else None}
            del found["texts"]
            result["load"] = found
            print({k: v for k, v in found.items() if k != "memory"}, flush=True)
    speeds: dict = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(served(command, logs / f"serve-{number}.log"))
            for number, (name, command) in enumerate(programs.items())
        }
        for number in range(given.rounds):
            for at_once in (1, AT_ONCE):
                own = questions[: QUESTIONS if at_once > 1 else 40]
                texts = {}
                for name, (_, url) in running.items():
                    found = asyncio.run(load(url, own, at_once))
                    texts[name] = found["texts"]
                    entry = speeds.setdefault(f"{name} at {at_once}", [])
                    same = sum(
                        text == texts["token-recycling"][index]
                        for index, text in found["texts"].items()
                    )
                    entry.append(
                        {
                            "tokens_per_second": found["tokens_per_second"],
                            "statuses": found["statuses"],
                            "same_texts": [same, len(own)],
                        }
                    )
                    print(number, at_once, name, entry[-1], flush=True)
    result["side_by_side"] = speeds
    write_text(given.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
