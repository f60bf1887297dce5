"""Fit the adaptive drafter's constants on one half of recorded answers, check on the other.

    python lab/fit.py calibration --model FOLDER --answers RECORDS.pt

Every subcommand prints what it found and the MAT before and after. "Cold" empties the matrix before
each answer, "hot" keeps it.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from questions import CHECK, FIT, half
from record import Recording
from replay import Answers, Run, by_kind, mat, run
from token_recycling import TokenRecycling
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.kernels.host import rates, state
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.templates import FOLDER, TreeTemplate

app = typer.Typer(pretty_exceptions_enable=False)
SIZES = (7, 15, 60)
PROSE = ("writing", "roleplay", "reasoning", "stem", "humanities", "coding")
Model = Annotated[str, typer.Option(help="Checkpoint.")]
Path_ = Annotated[Path, typer.Option("--answers", help="Written by record.py.")]
Make = Callable[[], AdaptiveDrafter]


def opened(model: str, path: Path) -> tuple[Answers, list[Recording], list[Recording]]:
    """Return the recordings, and those of the two halves."""
    torch.set_num_threads(2)
    recycler = TokenRecycling.from_pretrained(model, device="cpu", nodes=4)
    answers = Answers(path, recycler)
    halves = [half(answers.recordings, which) for which in (FIT, CHECK)]
    print(f"{len(halves[0])} answers to fit, {len(halves[1])} to check")
    return answers, halves[0], halves[1]


def drafter(answers: Answers, k: int = 12, **options: Any) -> AdaptiveDrafter:
    """Return a drafter with an empty matrix."""
    return AdaptiveDrafter(AdjacencyMatrix(answers.vocab_size, k), **options)


def compare(
    answers: Answers,
    chosen: Sequence[Recording],
    makes: dict[str, Make],
    sizes: Sequence[int] = SIZES,
    starts: Sequence[str] = ("cold", "hot"),
) -> dict[str, dict[str, float]]:
    """Print the MAT of all drafters, at each size, with cold and hot starts."""
    table: dict[str, dict[str, float]] = {name: {} for name in makes}
    missing: dict[str, dict[str, float]] = {name: {} for name in makes}
    for start in starts:
        for size in sizes:
            runs = {name: Run(make(), size) for name, make in makes.items()}
            for one in chosen:
                if start == "cold":
                    for name, each in runs.items():
                        each.drafter = makes[name]()
                run(answers, [one], runs)
            for name, each in runs.items():
                table[name][f"{start} {size}"] = mat(each.results)
                nodes = sum(one.nodes for one in each.results)
                unknown = sum(one.unknown for one in each.results)
                missing[name][f"{start} {size}"] = unknown / max(nodes, 1)
    columns = list(next(iter(table.values())))
    first = next(iter(table.values()))
    print(f"{'':24}" + "".join(f"{column:>16}" for column in columns))
    for name, row in table.items():
        cells = (f"{row[c]:.3f} {100 * (row[c] / first[c] - 1):+5.1f}%" for c in columns)
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    worst = {c: max(row[c] for row in missing.values()) for c in columns}
    print(f"{'without candidates':24}" + "".join(f"{worst[c]:>16.0%}" for c in columns))
    return table


@app.command()
def prepare(
    model: Model,
    path: Path_,
    nodes: int = 40,
    halves: str = "10",
    starts: str = "hot,cold",
) -> None:
    """Compute the candidates that the other subcommands need; as slow as decoding."""
    answers, fit, check = opened(model, path)
    answers.exact = True
    for which in halves:
        for start in starts.split(","):
            each = Run(drafter(answers), nodes)
            for one in (fit, check)[int(which)]:
                if start == "cold":
                    each.drafter = drafter(answers)
                run(answers, [one], {"": each})
            answers.save()
            print(f"half {which}, {start}: {answers.computed} nodes computed", flush=True)


@app.command()
def measure(
    model: Model,
    path: Path_,
    sizes: str = "15,60",
    starts: str = "cold,hot",
    exact: bool = True,
    first: Annotated[Path | None, typer.Option("--start", help="Matrix to start from.")] = None,
) -> None:
    """MAT of the drafter of this checkout on the checking half, by kind of question."""
    answers, _, check = opened(model, path)
    answers.exact = exact

    def made() -> AdaptiveDrafter:
        return drafter(answers) if first is None else AdaptiveDrafter(AdjacencyMatrix.load(first))

    for start, size in product(starts.split(","), map(int, sizes.split(","))):
        each = Run(made(), size)
        for one in check:
            if start == "cold":
                each.drafter = made()
            run(answers, [one], {"": each})
        prose = mat(one for one in each.results if one.kind in PROSE)
        kinds = {kind: round(value, 2) for kind, value in by_kind(each.results).items()}
        print(f"{start}, {size} nodes: MAT {mat(each.results):.3f}, prose {prose:.3f}, {kinds}")
        if exact:
            answers.save()


# Calibration


def log_odds(rate: Any) -> Any:
    return np.log(rate / (1 - rate))


def regress(features: Any, hits: Any, trials: Any, ridge: float = 1e-3) -> Any:
    """Fit logit(rate) = features · w by binomial likelihood (Newton's method)."""
    w = np.zeros(features.shape[1])
    for _ in range(50):
        rate = 1 / (1 + np.exp(-features @ w))
        slope = features.T @ (hits - trials * rate) - ridge * w
        curve = (features * (trials * rate * (1 - rate))[:, None]).T @ features
        w += np.linalg.solve(curve + ridge * np.eye(len(w)), slope)
    return w


def fitted_rates(evidence: Any, k: int) -> tuple[Any, dict[str, Any]]:
    """Return rates per feature, float64 [f], and the constants that give them."""
    hits, trials = evidence.astype(np.float64)
    lacking, chain, beside, nothing = rates.feature_offsets(k)
    expected = rates.expected_rates(k).copy()
    odds = np.arange(rates.BINS) / 2 - 9.0
    found: dict[str, Any] = {"row": [], "lacking": []}
    for level in range(state.LEVELS + 2):  # those of the root row too
        part = slice(level * k * rates.BINS, (level + 1) * k * rates.BINS)
        rank, of = np.divmod(np.arange(k * rates.BINS), rates.BINS)
        x = np.stack([np.ones(len(of)), odds[of], np.log2(1 + rank)], axis=1)
        w = regress(x, hits[part], trials[part])
        expected[part] = 1 / (1 + np.exp(-x @ w))
        found["row"].append(w.round(2).tolist())
        part = slice(lacking + level * rates.BINS, lacking + (level + 1) * rates.BINS)
        x = np.stack([np.ones(rates.BINS), odds], axis=1)
        w = regress(x, hits[part], trials[part])
        expected[part] = 1 / (1 + np.exp(-x @ w))
        found["lacking"].append(w.round(2).tolist())
    runs, depths = len(rates.RUNS), len(rates.DEPTHS)
    part = slice(chain, beside)
    smooth = (hits[part].reshape(runs, depths) + 0.5) / (trials[part].reshape(runs, depths) + 1)
    found["chain"] = smooth.round(3).tolist()
    found["chain trials"] = trials[part].reshape(runs, depths).astype(int).tolist()
    total = hits[part].reshape(runs, depths).sum(1), trials[part].reshape(runs, depths).sum(1)
    by_run = (total[0] + 0.5) / (total[1] + 1)
    found["runs"] = by_run.round(2).tolist()
    weight = 20.0
    expected[part] = (
        (hits[part].reshape(runs, depths) + weight * by_run[:, None])
        / (trials[part].reshape(runs, depths) + weight)
    ).flatten()
    part = slice(beside, nothing)
    found["beside"] = ((hits[part] + 0.5) / (trials[part] + 1)).round(4).tolist()
    expected[part] = (hits[part] + 0.5) / (trials[part] + 1)
    return np.clip(expected, rates.LOWEST, rates.HIGHEST), found


def started(base: AdaptiveDrafter, rates: Any = None, weights: Any = None) -> AdaptiveDrafter:
    """Give a new drafter other initial rates and weights."""
    if rates is not None:
        base._rates = rates
    if weights is not None:
        base.matrix.weights.copy_(torch.from_numpy(weights))
    return base


def averaged_weights(
    answers: Answers, chosen: Sequence[Recording], make: Make, nodes: int
) -> tuple[Any, Any]:
    """Return the mean weights over the second half of a hot run, and its evidence."""
    each = Run(make(), nodes)
    found = []
    for one in chosen:
        run(answers, [one], {"": each})
        found.append(each.drafter.matrix.weights.numpy().copy())
    return np.mean(found[len(found) // 2 :], axis=0), each.drafter.matrix.evidence.numpy()


@app.command()
def calibration(model: Model, path: Path_, nodes: int = 15, exact: bool = False) -> None:
    """Initial rates and weights of the calibration."""
    answers, fit, check = opened(model, path)
    weights, evidence = averaged_weights(answers, fit, lambda: drafter(answers), nodes)
    rates, found = fitted_rates(evidence, 12)
    first = rates.initial_weights()
    again, _ = averaged_weights(
        answers, fit, lambda: started(drafter(answers), rates, weights), nodes
    )
    print(json.dumps(found))
    print("weights", json.dumps(again.round(2).tolist()))
    rounded = again.round(2)
    makes: dict[str, Make] = {
        "before": lambda: drafter(answers),
        "rates": lambda: started(drafter(answers), rates, first),
        "weights": lambda: started(drafter(answers), None, rounded),
        "rates and weights": lambda: started(drafter(answers), rates, rounded),
    }
    answers.exact = exact
    compare(answers, check, makes, (15,) if exact else SIZES)
    if exact:
        answers.save()


@app.command()
def acceptance(model: Model, path: Path_, most: int = 80, exact: bool = False) -> None:
    """The expected acceptance of the node of each rank, a · n^-b, with a cold start."""
    answers, fit, check = opened(model, path)
    answers.exact = exact

    def shares(chosen: Sequence[Recording]) -> Any:
        accepted, steps = np.zeros(most), 0
        for one in chosen:
            result = answers.replay(drafter(answers), one, most, keep=True)
            for _, on_path in result.drafts:
                accepted[: len(on_path) - 1] += on_path[1:]
                steps += 1
        answers.save()
        return accepted / steps

    own, other = shares(fit), shares(check)
    best = (np.inf, 0.0, 0.0)
    points = np.array([n for n in (1, 3, 7, 11, 15, 23, 31, 47, 63, 80) if n <= most]) - 1
    for a in np.arange(0.1, 0.9, 0.01):
        for b in np.arange(0.5, 2.0, 0.01):
            sums = np.cumsum(a * np.arange(1, most + 1) ** -b)
            error = np.abs(np.log((1 + sums[points]) / (1 + np.cumsum(own)[points]))).max()
            best = min(best, (error, a, b))
    error, a, b = best
    print(f"fitted: {a:.2f} n^-{b:.2f}, largest error {100 * error:.1f} % of the MAT")
    before = np.cumsum(0.6 * np.arange(1, most + 1) ** -0.95)
    after = np.cumsum(a * np.arange(1, most + 1) ** -b)
    print(f"{'nodes':>6} {'MAT':>7} {'before':>7} {'after':>7}   (checking half)")
    for n in points + 1:
        print(f"{n:6} {1 + other[:n].sum():7.2f} {1 + before[n - 1]:7.2f} {1 + after[n - 1]:7.2f}")


@app.command()
def sizes(model: Model, path: Path_) -> None:
    """Candidates per row, and slots for pairs and triples."""
    answers, _, check = opened(model, path)
    compare(
        answers,
        check,
        {
            "k=12": lambda: drafter(answers),
            **{f"k={k}": (lambda k=k: drafter(answers, k)) for k in (4, 8, 16)},
            "8,191 pairs": lambda: drafter(answers, pairs=8191),
            "no triples": lambda: drafter(answers, triples=0),
            "32,749 triples": lambda: drafter(answers, triples=32749),
            "524,287 triples": lambda: drafter(answers, pairs=131071, triples=524287),
        },
        sizes=(15, 60),
        starts=("hot",),
    )


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


def tree_mat(paths: Sequence[list[tuple[int, ...]]], nodes: Collection[tuple[int, ...]]) -> float:
    """Return the MAT of a tree on answers whose rank paths are known."""
    chosen, tokens, steps = set(nodes), 0, 0
    for answer in paths:
        root = 0
        while root < len(answer):
            depth = 0
            while depth < len(answer[root]) and answer[root][: depth + 1] in chosen:
                depth += 1
            tokens, steps, root = tokens + depth + 1, steps + 1, root + depth + 1
    return tokens / steps


@app.command()
def tree(model: Model, path: Path_) -> None:
    """The ranked tree: which rank paths does the answers' text take most often? Writes it."""
    answers, fit, check = opened(model, path)
    matrix = AdjacencyMatrix(answers.vocab_size, TREE_CANDIDATES)
    counts: Counter[tuple[int, ...]] = Counter()
    steps = 0
    for one in fit:
        for taken in rank_paths(one, matrix):
            steps += 1
            counts.update(taken[:end] for end in range(1, len(taken) + 1))
    found = ranked(counts, steps)
    matrix = AdjacencyMatrix(answers.vocab_size, TREE_CANDIDATES)
    paths = [rank_paths(one, matrix) for one in check]
    before = TreeTemplate.load("ranked", TREE_CANDIDATES).paths
    print("MAT (checking half): nodes, published, before, after")
    published = TreeTemplate.load("paper", TREE_CANDIDATES).paths
    for size in (8, 16, 32, 80):
        row = (published, before[:size], [path for path, _ in found[:size]])
        cells = [tree_mat(paths, nodes) for nodes in row]
        print(size, "-" if size < 80 else f"{cells[0]:.3f}", *(f"{x:.3f}" for x in cells[1:]))
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
    app()
