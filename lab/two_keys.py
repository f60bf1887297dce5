"""Load from two keys, of which one floods: what the other one notices.

    python lab/two_keys.py --model FOLDER --data ../shared/data --minutes 10 --out FILE

Key "one" keeps ``--connections`` requests open and sends the next at once, or 0.2 s after a 429.
Key "two" asks one question after another, streamed, with a second between them. Printed are, for
each, status codes and quartiles of the time to the first token, and the server's memory. The first
minute of the same is done without the flood, to compare with.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import torch
import typer

from measure_server import memory, served
from questions import CHECK, half, questions
from token_recycling.util.files import write_text
from token_recycling.util.machine import describe

KEYS = ("one", "two")
ALONE = 60.0  # seconds without the flood
PAUSE = 1.0  # seconds between two questions of key "two"


async def ask(client: httpx.AsyncClient, key: str, question: str, tokens: int) -> tuple[int, float]:
    """Return the status, and the seconds to the first token of a streamed answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    headers, begun, first = {"Authorization": f"Bearer {key}"}, time.monotonic(), 0.0
    sent = client.stream("POST", "/v1/chat/completions", json=body, headers=headers)
    async with sent as answer:
        async for line in answer.aiter_lines():
            if not first and '"content":"' in line.replace(" ", ""):
                first = time.monotonic() - begun
        return answer.status_code, first


def quartiles(found: list[float]) -> list[float]:
    """Return the quartiles, in seconds."""
    if len(found) < 2:
        return found
    return [round(value, 3) for value in statistics.quantiles(found, n=4)]


async def run(
    url: str,
    process: subprocess.Popen[bytes],
    asked: list[str],
    seconds: float,
    connections: int,
    tokens: int,
) -> dict[str, Any]:
    """Ask for so many seconds; return what both keys got."""
    end = time.monotonic() + seconds
    statuses: dict[str, Counter[int]] = {key: Counter() for key in KEYS}
    first: dict[str, list[float]] = {key: [] for key in KEYS}
    marks: list[float] = []
    questions_of = {key: cycle(asked) for key in KEYS}
    limits = httpx.Limits(max_connections=connections + 2)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(key: str, pause: float) -> None:
            while time.monotonic() < end:
                status, waited = await ask(client, key, next(questions_of[key]), tokens)
                statuses[key][status] += 1
                if status == 200:
                    first[key].append(waited)
                await asyncio.sleep(0.2 if status == 429 else pause)

        async def watch() -> None:
            while time.monotonic() < end:
                marks.append(round(memory(process), 1))
                await asyncio.sleep(10)

        flood = [work(KEYS[0], 0.0) for _ in range(connections)]
        await asyncio.gather(*flood, work(KEYS[1], PAUSE), watch())
    return {
        "connections of key one": connections,
        "statuses": {key: dict(found) for key, found in statuses.items()},
        "seconds to the first token": {key: quartiles(found) for key, found in first.items()},
        "slowest": {key: round(max(found, default=0), 3) for key, found in first.items()},
        "memory": marks,
    }


def main(
    model: Annotated[str, typer.Option(help="Checkpoint.")],
    data: Annotated[Path, typer.Option(help="Folder of the question files.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    minutes: Annotated[float, typer.Option(help="With the flood.")] = 10.0,
    connections: Annotated[int, typer.Option(help="Of the flooding key.")] = 100,
    tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 64,
    threads: Annotated[int, typer.Option(help="CPU threads of the server.")] = 2,
) -> None:
    """Start a server, measure, and print."""
    asked = [question.turns[0] for question in half(questions(data), CHECK)]
    asked = [one for one in asked if len(one) < 1500]
    tool = str(Path(sys.executable).with_name("token-recycling"))
    command = [tool, "serve", model, "--threads", str(threads)]
    for key in KEYS:
        command += ["--api-key", key]
    found: dict[str, Any] = {
        "machine": describe(torch.device("cpu")),
        "model": Path(model).name,
        "tokens": tokens,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        served(command, Path(folder) / "log") as (process, url),
    ):
        for name, seconds, flooding in (
            ("alone", ALONE, 0),
            ("with a flood", 60 * minutes, connections),
        ):
            part = asyncio.run(run(url, process, asked, seconds, flooding, tokens))
            found[name] = part
            print(name, json.dumps(part, indent=1), flush=True)
    write_text(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
