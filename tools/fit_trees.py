"""Fit the ranked tree: which rank paths does greedy text take most often?

    python tools/fit_trees.py --data ../shared/data

Plain greedy answers of the bundled model are decoded again with the paper's tree. Before every
step the path that the known answer takes through the matrix is counted, with all its
beginnings. Seldom paths are smoothed by the product of how often each rank was right. Answers
that end in a loop are left out: they would fill the tree with one endless path.
"""

from __future__ import annotations

import heapq
import json
import lzma
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from token_recycling.accept import Accepted
from token_recycling.drafters import PaperDrafter, Rows
from token_recycling.recycler import TokenRecycling
from token_recycling.tree import FOLDER, DraftTree
from train_demo_model import loops

NODES = 256
CANDIDATES = 16
MAX_DEPTH = 8
SMOOTHING = 50.0  # steps that the product of the ranks' acceptance counts for
SHOWN = (4, 8, 16, 32, 80)


@dataclass
class Progress(Rows):
    """How much of the answer has been written, the next root left out; there is one row."""

    tokens: int = 0


class CountingDrafter(PaperDrafter):
    """The paper's drafter; counts the rank paths of the answer that is already known."""

    answer: list[int]
    counts: Counter[tuple[int, ...]]

    def new_rows(self, batch: int, capacity: int | None = None) -> Progress:
        return Progress()

    def load(self, rows: Progress, texts: list[list[int]]) -> None:
        rows.tokens = 0

    def propose(self, rows: Progress, roots: torch.Tensor, nodes: int | None = None) -> DraftTree:
        path: tuple[int, ...] = ()
        ahead = self.answer[rows.tokens : rows.tokens + MAX_DEPTH + 1]
        for token, following in pairwise(ahead):
            row = self.matrix.candidates[token].tolist()
            if following not in row:
                break
            path += (row.index(following),)
            self.counts[path] += 1
        return super().propose(rows, roots, nodes)

    def observe(
        self, rows: Progress, draft: DraftTree, logits: torch.Tensor, accepted: Accepted
    ) -> None:
        rows.tokens += len(accepted.tokens[0])
        super().observe(rows, draft, logits, accepted)


def read_prompts(data: Path, each: int) -> list[str]:
    """Questions of GSM8K's training part and MBPP, and beginnings from the books."""
    maths = [json.loads(x)["question"] for x in (data / "gsm8k_train.jsonl").open()][:each]
    code = [json.loads(x)["turns"][0] for x in (data / "mbpp/question.jsonl").open()][:each]
    text = lzma.decompress((data / "books.txt.xz").read_bytes()).decode()
    sentences = re.findall(r"\n\n([A-Z][^\n]{60,160}?[.!?]) ", text)
    stories = [f"Continue the story: {s}" for s in sentences[:: max(1, len(sentences) // each)]]
    return [*maths, *code, *stories[:each]]


def rank_acceptance(counts: Counter[tuple[int, ...]], steps: int) -> list[float]:
    """How often each rank was right where its node was reached."""
    reached: Counter[int] = Counter()
    for path, count in counts.items():
        reached[path[-1]] += count
    tried = steps + sum(count for path, count in counts.items() if len(path) < MAX_DEPTH)
    return [reached[rank] / tried for rank in range(CANDIDATES)]


def rank(counts: Counter[tuple[int, ...]], steps: int) -> list[tuple[tuple[int, ...], float]]:
    """The ``NODES`` paths that are right most often, with their acceptance, best first.

    A path is never right more often than its beginning, so any first N of them are a tree.
    """
    by_rank = rank_acceptance(counts, steps)
    heap: list[tuple[float, int, tuple[int, ...], float]] = [(-1.0, 0, (), 1.0)]
    ranked: list[tuple[tuple[int, ...], float]] = []
    while len(ranked) <= NODES:
        negative, depth, path, product = heapq.heappop(heap)
        ranked.append((path, -negative))
        for rank_, acceptance in enumerate(by_rank if depth < MAX_DEPTH else ()):
            child, expected = (*path, rank_), product * acceptance
            worth = (counts[child] + SMOOTHING * expected) / (steps + SMOOTHING)
            heapq.heappush(heap, (max(negative, -worth), depth + 1, child, expected))
    return ranked[1:]


def main(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl, mbpp, books.txt.xz.")],
    each: Annotated[int, typer.Option(help="Prompts of each of the three kinds.")] = 25,
    tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 120,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Write src/token_recycling/trees/ranked.json."""
    torch.set_num_threads(threads)
    recycler = TokenRecycling.from_pretrained(device="cpu", tree="paper", k=CANDIDATES, warm=False)
    drafter = CountingDrafter(recycler.matrix, recycler.template)
    drafter.counts = Counter()
    recycler.drafter = drafter
    steps = 0
    for prompt in track(read_prompts(data, each), "counting"):
        messages = [{"role": "user", "content": prompt}]
        drafter.answer = []
        before = recycler.matrix.clone()
        drafter.answer = recycler.generate(messages, max_new_tokens=tokens).token_ids  # type: ignore[union-attr]
        recycler.matrix.copy_(before)
        if loops(drafter.answer, longest=18):
            continue
        steps += recycler.generate(messages, max_new_tokens=tokens).stats.steps  # type: ignore[union-attr]
    ranked = rank(drafter.counts, steps)
    tree = {
        "name": "ranked",
        "description": "rank paths that greedy text takes, the most frequent first",
        "provenance": (
            f"tools/fit_trees.py --each {each} --tokens {tokens}: {steps} steps of the bundled "
            "model on GSM8K training questions, MBPP questions and beginnings from the books"
        ),
        "paths": [list(path) for path, _ in ranked],
        "acceptance": [round(acceptance, 5) for _, acceptance in ranked],
    }
    (FOLDER / "ranked.json").write_text(json.dumps(tree) + "\n", encoding="utf-8")
    for size in SHOWN:
        mat = 1 + sum(acceptance for _, acceptance in ranked[:size])
        print(f"ranked-{size}: expected MAT {mat:.2f}")


if __name__ == "__main__":
    typer.run(main)
