"""Fit the small trees: which rank paths does greedy text take most often?

    python tools/fit_trees.py --data ../shared/data

Plain greedy answers of the bundled model are decoded again with the paper's tree. Before every
step the path that the known answer takes through the matrix is counted, with all its
beginnings. The tree of N nodes is the N most frequent ones; a beginning is never rarer than its
path, so the nodes always form a tree. Answers that end in a loop are left out: they would fill
the trees with one endless path.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track

from token_recycling.accept import Accepted
from token_recycling.api import TokenRecycling
from token_recycling.drafters import PaperDrafter
from token_recycling.tree import FOLDER, DraftTree
from train_demo_model import loops

SIZES = (4, 8, 16, 32)
MAX_DEPTH = 8


class CountingDrafter(PaperDrafter):
    """The paper's drafter; counts the rank paths of the answer that is already known."""

    answer: list[int]
    counts: Counter[tuple[int, ...]]

    def start(self, prompts: list[list[int]]) -> None:
        self.position = 0

    def propose(self, roots: torch.Tensor) -> DraftTree:
        path: tuple[int, ...] = ()
        ahead = self.answer[self.position : self.position + MAX_DEPTH + 1]
        for token, following in pairwise(ahead):
            row = self.matrix.candidates[token].tolist()
            if following not in row:
                break
            path += (row.index(following),)
            self.counts[path] += 1
        return super().propose(roots)

    def observe(self, draft: DraftTree, logits: torch.Tensor, accepted: Accepted) -> None:
        self.position += len(accepted.tokens[0])
        super().observe(draft, logits, accepted)


def read_prompts(data: Path, each: int) -> list[str]:
    """Questions of GSM8K's training part and MBPP, and beginnings from the books."""
    maths = [json.loads(x)["question"] for x in (data / "gsm8k_train.jsonl").open()][:each]
    code = [json.loads(x)["turns"][0] for x in (data / "mbpp/question.jsonl").open()][:each]
    text = lzma.decompress((data / "books.txt.xz").read_bytes()).decode()
    sentences = re.findall(r"\n\n([A-Z][^\n]{60,160}?[.!?]) ", text)
    stories = [f"Continue the story: {s}" for s in sentences[:: max(1, len(sentences) // each)]]
    return [*maths, *code, *stories[:each]]


def main(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl, mbpp, books.txt.xz.")],
    each: Annotated[int, typer.Option(help="Prompts of each of the three kinds.")] = 25,
    tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 120,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Write src/token_recycling/trees/small-N.json for N = 4, 8, 16, 32."""
    torch.set_num_threads(threads)
    recycler = TokenRecycling.from_pretrained(device="cpu", tree="paper")
    drafter = CountingDrafter(recycler.matrix, recycler.template)
    drafter.counts = Counter()
    recycler.drafter = drafter
    steps = 0
    for prompt in track(read_prompts(data, each), "counting"):
        messages = [{"role": "user", "content": prompt}]
        drafter.answer = []
        before = recycler.matrix.clone()
        counts = drafter.counts.copy()
        drafter.answer = recycler.generate(messages, max_new_tokens=tokens).token_ids  # type: ignore[union-attr]
        recycler.matrix.copy_(before)
        drafter.counts = counts
        if loops(drafter.answer, longest=18):
            continue
        steps += recycler.generate(messages, max_new_tokens=tokens).stats.steps  # type: ignore[union-attr]
    ranked = sorted(drafter.counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    for size in SIZES:
        kept = ranked[:size]
        tree = {
            "name": f"small-{size}",
            "description": f"the {size} rank paths that greedy text takes most often",
            "provenance": (
                f"tools/fit_trees.py --each {each} --tokens {tokens}: {steps} steps of the bundled "
                "model on GSM8K training questions, MBPP questions and beginnings from the books"
            ),
            "paths": sorted((list(path) for path, _ in kept), key=lambda p: (len(p), p)),
        }
        (FOLDER / f"small-{size}.json").write_text(json.dumps(tree) + "\n", encoding="utf-8")
        expected = 1 + sum(count for _, count in kept) / steps
        print(f"small-{size}: expected MAT {expected:.2f} on these prompts; {tree['paths']}")


if __name__ == "__main__":
    typer.run(main)
