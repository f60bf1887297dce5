"""Run what a reader runs: every block of README.md, and of the first screen of each page of docs/.

    python tests/docs/run_examples.py OUT

A clone of what is committed gets an environment of its own (``make setup``), in which the blocks
of a page run one after another. OUT has a file for each page, with every command, what it printed,
its seconds and its exit code: to be read by a person. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TextIO

ROOT = Path(__file__).parents[2]
SCREEN = 45  # lines of a page that a reader sees first
LIMIT = 900  # seconds of a command
# What is typed where a command asks.
TYPED = "What is the capital of France?\nAnd of Italy?\n"
HEALTH = "http://127.0.0.1:8000/health"
# Beginnings of commands that are not run here, and why.
SKIPPED = {
    "pip install": "it is not on PyPI",
    "vllm": "needs an environment with vLLM: make test-vllm",
    "python -m sglang": "needs an environment with SGLang: make test-sglang",
    "make test": "runs by itself: make test",
    "make hub": "writes a folder to upload",
    "python lab/gpu": "needs a GPU",
}


class Block(NamedTuple):
    """A block of a page.

    Attributes:
        language: as the page says: "sh", "python", "text" …
        text: without the fences.
        line: where it begins.
    """

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    text = page.read_text("utf-8")
    return [
        Block(match[1], match[2], text[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    ]


def wanted(page: Path) -> list[Block]:
    """Return the blocks of a page that a reader is expected to run."""
    last = 10**6 if page.name == "README.md" else SCREEN
    return [b for b in blocks(page) if b.language in ("sh", "python") and b.line <= last]


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a shell block, each of one line or several."""
    held = ""
    for line in block.splitlines():
        held += line + "\n"
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        if held.rstrip().endswith("\\"):
            continue
        if words:
            yield held.strip()
        held = ""


def skipped(command: str) -> str | None:
    """Return why a command is not run; None if it is."""
    reasons = (why for begin, why in SKIPPED.items() if command.startswith(begin))
    return next(reasons, None)


class Reader:
    """Runs the blocks of a page in a checkout, and notes what they print."""

    def __init__(self, checkout: Path, out: Path) -> None:
        self.checkout, self.out, self.failures = checkout, out, 0
        path = f"{checkout / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "PYTHON"))},
            **{"PATH": path, "TOKEN_RECYCLING_CACHE": str(checkout.parent / "cache")},
        }
        self.servers: list[subprocess.Popen[str]] = []

    def read(self, page: Path, name: str) -> None:
        """Run the blocks of a page."""
        with (self.out / f"{name.replace('/', '-')}.txt").open("w", encoding="utf-8") as file:
            for block in wanted(page):
                if block.language == "python":
                    self._note(file, ["python", "-c", block.text], block.text)
                    continue
                for command in commands(block.text):
                    self._shell(file, command)
            for server in self.servers:
                server.terminate()
                print(f"What the server printed:\n{server.communicate()[0]}", file=file)
        self.servers.clear()

    def _shell(self, file: TextIO, command: str) -> None:
        name, _, value = command.partition("=")
        if (why := skipped(command)) is not None:
            print(f"$ {command}\n(not run: {why})\n", file=file, flush=True)
        elif command.startswith("token-recycling serve"):
            self._serve(file, command)
        elif name.isidentifier():  # MODEL=$(…), for the commands after it
            found = self._note(file, ["bash", "-c", f"echo {value}"], command)
            self.environment[name] = found.strip().splitlines()[-1]
        else:
            self._note(file, ["bash", "-c", command], command)

    def _note(self, file: TextIO, command: list[str], shown: str) -> str:
        begin = time.monotonic()
        typed = TYPED if " chat " in shown else ""
        done = subprocess.run(
            command, input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self.environment, cwd=self.checkout, timeout=LIMIT,
        )  # fmt: skip
        seconds = time.monotonic() - begin
        self.failures += bool(done.returncode)
        print(
            f"$ {shown}\n{done.stdout}[{seconds:.1f} s, exit code {done.returncode}]\n",
            file=file,
            flush=True,
        )
        return done.stdout

    def _serve(self, file: TextIO, command: str) -> None:
        """Start a server, and wait until it answers."""
        words = ["bash", "-c", f"exec {command}"]
        self.servers.append(
            subprocess.Popen(
                words, text=True, env=self.environment, cwd=self.checkout,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        for _ in range(240):
            try:
                urllib.request.urlopen(HEALTH).close()
                said = "answers"
                break
            except OSError:
                time.sleep(0.5)
        else:
            said, self.failures = "does not answer", self.failures + 1
        print(f"$ {command}\n[{said}]\n", file=file, flush=True)


def main() -> int:
    """Run all pages; return the exit code."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        checkout = Path(folder, "token-recycling")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        subprocess.run(["make", "--silent", "setup"], cwd=checkout, check=True)
        reader = Reader(checkout, out)
        for page in [checkout / "README.md", *sorted((checkout / "docs").glob("*.md"))]:
            name = str(page.relative_to(checkout).with_suffix(""))
            before, begin = reader.failures, time.monotonic()
            reader.read(page, name)
            seconds = time.monotonic() - begin
            failed = reader.failures - before
            print(
                f"{name}: {len(wanted(page))} blocks, {failed} failed, {seconds:.0f} s", flush=True
            )
    return int(reader.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
