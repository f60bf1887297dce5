"""Fit the adaptive drafter's constants on one half of recorded answers, check on the other.

    python lab/fit.py calibration --model FOLDER --answers RECORDS.pt

The subcommands print constants, and write the ranked tree; ``measure`` has the MAT of a checkout on
the other half. "Cold" empties the matrix before each answer, "hot" keeps it.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from questions import CHECK, FIT, half
from record import Recording
from replay import Answers, Result, by_kind, mat
from script import numbers, run
from token_recycling import TokenRecycling
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.kernels.host import rates, state
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.templates import FOLDER

app = typer.Typer(pretty_exceptions_enable=False)
K = 12  # candidates
PROSE = ("writing", "roleplay", "reasoning", "stem", "humanities", "coding")
Model = Annotated[str, typer.Option(help="Checkpoint.")]
Path_ = Annotated[Path, typer.Option("--answers", help="Written by record.py.")]
Make = Callable[[], AdaptiveDrafter]


def opened(model: str, path: Path) -> tuple[Answers, list[Recording], list[Recording]]:
    """Return the recordings, and those of the two halves."""
    torch.set_num_threads(2)
    answers = Answers(path, TokenRecycling.from_pretrained(model, device="cpu", nodes=4))
    fit, check = (half(answers.recordings, which) for which in (FIT, CHECK))
    print(f"{len(fit)} answers to fit, {len(check)} to check")
    return answers, fit, check


def drafter(answers: Answers) -> AdaptiveDrafter:
    """Return a drafter with an empty matrix."""
    return AdaptiveDrafter(AdjacencyMatrix(answers.vocab_size, K))


def decoded(
    answers: Answers, chosen: Sequence[Recording], make: Make, size: int, start: str
) -> tuple[list[Result], AdaptiveDrafter]:
    """Decode answers in turn with drafts of ``size`` nodes; return the last drafter too."""
    own, results = make(), []
    for one in chosen:
        own = make() if start == "cold" else own
        results.append(answers.replay(own, one, size))
    return results, own


@app.command()
def prepare(model: Model, path: Path_, nodes: int = 40) -> None:
    """Compute the candidates that the other subcommands need; as slow as decoding."""
    answers, fit, check = opened(model, path)
    answers.exact = True
    for chosen, start in product((check, fit), ("hot", "cold")):
        decoded(answers, chosen, lambda: drafter(answers), nodes, start)
        answers.save()
        print(f"{len(chosen)} answers, {start}: {answers.computed} nodes computed", flush=True)


@app.command()
def measure(
    model: Model, path: Path_, sizes: str = "15,60", starts: str = "cold,hot", exact: bool = True
) -> None:
    """MAT of the drafter of this checkout on the checking half, by kind of question."""
    answers, _, check = opened(model, path)
    answers.exact = exact
    for start, size in product(starts.split(","), numbers(sizes)):
        results, _ = decoded(answers, check, lambda: drafter(answers), size, start)
        prose = mat(one for one in results if one.kind in PROSE)
        kinds = {kind: round(value, 2) for kind, value in by_kind(results).items()}
        print(f"{start}, {size} nodes: MAT {mat(results):.3f}, prose {prose:.3f}, {kinds}")
        if exact:
            answers.save()


# Calibration


def regress(features: Any, hits: Any, trials: Any, ridge: float = 1e-3) -> Any:
    """Fit logit(rate) = features · w by binomial likelihood (Newton's method)."""
    w = np.zeros(features.shape[1])
    for _ in range(50):
        rate = 1 / (1 + np.exp(-features @ w))
        slope = features.T @ (hits - trials * rate) - ridge * w
        curve = (features * (trials * rate * (1 - rate))[:, None]).T @ features
        w += np.linalg.solve(curve + ridge * np.eye(len(w)), slope)
    return w


def constants(evidence: Any) -> dict[str, Any]:
    """Return the constants of ``rates.expected_rates`` that fit the hits and trials of features."""
    hits, trials = evidence.astype(np.float64)
    lacking, chain, beside, nothing = rates.feature_offsets(K)
    odds = np.arange(rates.BINS) / 2 - 9.0
    rank, of = np.divmod(np.arange(K * rates.BINS), rates.BINS)

    def regressed(first: int, *columns: Any) -> Any:
        part = slice(first, first + len(columns[0]))
        x = np.stack([np.ones(len(columns[0])), *columns], axis=1)
        return regress(x, hits[part], trials[part]).round(2).tolist()

    levels = range(state.LEVELS + 2)  # those of the root row too
    right, tried = (x[chain:beside].reshape(len(rates.RUNS), -1) for x in (hits, trials))
    alone = slice(beside, nothing)
    return {
        "row": [regressed(level * len(of), odds[of], np.log2(1 + rank)) for level in levels],
        "lacking": [regressed(lacking + level * rates.BINS, odds) for level in levels],
        "chain": ((right + 0.5) / (tried + 1)).round(3).tolist(),
        "chain trials": tried.astype(int).tolist(),
        "runs": ((right.sum(1) + 0.5) / (tried.sum(1) + 1)).round(2).tolist(),
        "beside": ((hits[alone] + 0.5) / (trials[alone] + 1)).round(4).tolist(),
    }


@app.command()
def calibration(model: Model, path: Path_, nodes: int = 15) -> None:
    """Initial rates of the calibration."""
    answers, fit, _ = opened(model, path)
    _, taught = decoded(answers, fit, lambda: drafter(answers), nodes, "hot")
    print(json.dumps(constants(taught.matrix.evidence.numpy())))


@app.command()
def acceptance(model: Model, path: Path_, most: int = 80, exact: bool = False) -> None:
    """The expected acceptance of the node of each rank, a · n^-b, with a cold start."""
    answers, fit, _ = opened(model, path)
    answers.exact = exact
    accepted, steps = np.zeros(most), 0
    for one in fit:
        for on_path in answers.replay(drafter(answers), one, most).on_path:
            accepted[: len(on_path) - 1] += on_path[1:]
            steps += 1
    answers.save()
    best = (np.inf, 0.0, 0.0)
    points = np.array([n for n in (1, 3, 7, 11, 15, 23, 31, 47, 63, 80) if n <= most]) - 1
    found = 1 + np.cumsum(accepted / steps)[points]
    for a, b in product(np.arange(0.1, 0.9, 0.01), np.arange(0.5, 2.0, 0.01)):
        sums = 1 + np.cumsum(a * np.arange(1, most + 1) ** -b)[points]
        best = min(best, (np.abs(np.log(sums / found)).max(), a, b))
    error, a, b = best
    print(f"fitted: {a:.2f} n^-{b:.2f}, largest error {100 * error:.1f} % of the MAT")


# The ranked tree

TREE_NODES, TREE_CANDIDATES, TREE_DEPTH = 256, 16, 8
SMOOTHING = 50.0  # steps that the product of the ranks' acceptance counts for


def rank_paths(one: Recording, matrix: AdjacencyMatrix) -> list[tuple[int, ...]]:
    """Return, for every token of an answer as a root, the ranks along which the matrix has it.

    The matrix learns as the published drafter does, from the prompt and the answer; the rows of
    rejected nodes are left out.
    """
    k = matrix.k
    tokens = torch.tensor(one.prompt)
    matrix.update(tokens, torch.from_numpy(one.prompt_ids[:, :k].astype(np.int64)))
    found = []
    for root in range(len(one.answer) - 1):
        path: tuple[int, ...] = ()
        ahead = one.answer[root : root + TREE_DEPTH + 1]
        for token, following in pairwise(ahead):
            row = matrix.candidates[token].tolist()
            if following not in row:
                break
            path += (row.index(following),)
        found.append(path)
        at = one.places[root, ()]
        row = torch.from_numpy(one.ids[at, :k].astype(np.int64))
        matrix.update(torch.tensor([one.answer[root]]), row[None])
    return found


def rank_acceptance(counts: Counter[tuple[int, ...]], steps: int) -> list[float]:
    """Return how often each rank was right where its node was reached."""
    reached: Counter[int] = Counter()
    for path, count in counts.items():
        reached[path[-1]] += count
    tried = steps + sum(count for path, count in counts.items() if len(path) < TREE_DEPTH)
    return [reached[rank] / tried for rank in range(TREE_CANDIDATES)]


def ranked(counts: Counter[tuple[int, ...]], steps: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the paths that are right most often, with their acceptance, best first.

    A path is never right more often than its beginning, so any first N of them are a tree.
    """
    by_rank = rank_acceptance(counts, steps)
    heap: list[tuple[float, int, tuple[int, ...], float]] = [(-1.0, 0, (), 1.0)]
    found: list[tuple[tuple[int, ...], float]] = []
    while len(found) <= TREE_NODES:
        negative, depth, path, product = heapq.heappop(heap)
        found.append((path, -negative))
        for rank, acceptance in enumerate(by_rank if depth < TREE_DEPTH else ()):
            child, expected = (*path, rank), product * acceptance
            worth = (counts[child] + SMOOTHING * expected) / (steps + SMOOTHING)
            heapq.heappush(heap, (max(negative, -worth), depth + 1, child, expected))
    return found[1:]


@app.command()
def tree(model: Model, path: Path_) -> None:
    """The ranked tree: which rank paths does the answers' text take most often? Writes it."""
    answers, fit, _ = opened(model, path)
    matrix = AdjacencyMatrix(answers.vocab_size, TREE_CANDIDATES)
    counts: Counter[tuple[int, ...]] = Counter()
    steps = 0
    for one in fit:
        for taken in rank_paths(one, matrix):
            steps += 1
            counts.update(taken[:end] for end in range(1, len(taken) + 1))
    found = ranked(counts, steps)
    text = {
        "name": "ranked",
        "description": "rank paths that greedy text takes, the most frequent first",
        "provenance": (
            f"lab/fit.py tree: {steps} tokens of {len(fit)} answers of SmolLM2-135M-Instruct to "
            "questions of Spec-Bench, GSM8K and MBPP"
        ),
        "paths": [list(path) for path, _ in found],
        "acceptance": [round(acceptance, 5) for _, acceptance in found],
    }
    (FOLDER / "ranked.json").write_text(json.dumps(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(app)
