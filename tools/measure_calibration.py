"""Does the MAT come that the adaptive drafter promises? Steps of the builtin suite, in tenths.

python tools/measure_calibration.py [--out FILE.json] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from token_recycling import TokenRecycling
from token_recycling.bench import suites
from token_recycling.bench.runner import conversation
from token_recycling.draft_size.auto import AutoSize
from token_recycling.files import write_text
from token_recycling.machine import describe
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence

TENTHS = 10


class Logged(AutoSize):
    """Notes what every drafted step promised, and what came."""

    log: list[tuple[float, int]]

    def _best(self, mats: list[float], nodes: list[float]) -> int:
        self._mats = mats
        return super()._best(mats, nodes)

    def limit(self) -> int | None:
        self._mats = []
        return super().limit()

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        if self._mats:
            self.log.append((self._mats[self._size], len(step.tokens[0])))
        super().record(step, sequences)


def measure(per_kind: int, new_tokens: int) -> dict[str, object]:
    """Decode the suite twice, cold and hot, and sort the steps by their promise."""
    recycler = TokenRecycling.from_pretrained(device="cpu")
    size = recycler.draft_size
    assert isinstance(size, AutoSize)
    logged = Logged(recycler.drafter.acceptance, size.costs)
    recycler.draft_size = logged
    questions = suites.load_all(["builtin"], per_kind)
    runs = {}
    for run in ("cold", "hot"):
        logged.log = []
        for question in questions:
            prompt = conversation(recycler, [question.turns[0]], raw=False)
            recycler.generate(prompt, max_new_tokens=new_tokens)
        steps = sorted(logged.log)
        count = -(-len(steps) // TENTHS)
        groups = [steps[i : i + count] for i in range(0, len(steps), count)]
        promised, came = (sum(column) / len(steps) for column in zip(*steps))
        runs[run] = {
            "steps": len(steps),
            "promised": promised,
            "came": came,
            "tenths": [
                [sum(s[0] for s in group) / len(group), sum(s[1] for s in group) / len(group)]
                for group in groups
            ],
        }
    about = {"questions": [question.name for question in questions], "new_tokens": new_tokens}
    return {"machine": describe(torch.device("cpu")), **about, "runs": runs}


def plot(runs: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Draw what came against what was promised."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "calibration"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4))
    for run, mark in zip(runs, "os"):
        axes.plot(*zip(*runs[run]["tenths"]), mark, label=run)
    end = max(x for run in runs.values() for pair in run["tenths"] for x in pair)
    axes.plot([1, end], [1, end], color="grey", linewidth=1)
    axes.set(xlabel="tokens per step promised", ylabel="tokens per step that came")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--per-kind", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.per_kind, options.new_tokens)
    if options.out:
        write_text(options.out, json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(found["runs"], options.plot)  # type: ignore[arg-type]
    print(json.dumps(found["runs"], indent=1))
