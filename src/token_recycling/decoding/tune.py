"""Measurement of the cost of a decoding step by tokens verified and context length."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from token_recycling import defaults
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence as Text
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.size.costs import SIZES, CostCurve
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.base import Target
from token_recycling.model.limits import config_digest
from token_recycling.model.target import TreeTarget
from token_recycling.util.files import cache_folder
from token_recycling.util.machine import device_name, synchronize

CONTEXTS = (128, 512, 1024, 2048, 4096)
ROUNDS = 7  # per context; the median is used
SECONDS = 60.0  # per context, after which no new round starts
FEWEST = 3  # minimum of rounds, regardless of time
# A measurement at load: context, sizes, most rounds, seconds after which no round starts, and the
# longest plain step for which it is done at all.
QUICK_CONTEXT, QUICK_SIZES, QUICK_ROUNDS = 64, (1, 2, 4, 8, 12, 16, 24, 32, 48), 5
QUICK_SECONDS, QUICK_STEP = 1.5, 0.2


def longest(target: TreeTarget) -> int:
    """Return the longest context that leaves room for the largest draft."""
    limit = target.max_context
    return max(CONTEXTS) if limit is None else max(1, limit - max(SIZES))


class HasTarget(Protocol):
    """What is measured: a ``TokenRecycling`` object."""

    target: Target

    def forget_context(self) -> None:
        """Free the KV cache; an unfinished answer cannot continue."""


def measure(
    recycler: HasTarget,
    *,
    contexts: Collection[int] | None = None,
    sizes: Collection[int] = SIZES,
    rounds: int = ROUNDS,
    on_progress: Callable[[int, int], None] | None = None,
) -> CostCurve:
    """Time whole steps (propose, verify, accept, observe, commit) on random tokens.

    Sizes alternate within each round, so that temporary load on the machine affects all of them.
    The context of ``recycler`` is dropped; its matrix is not touched.

    Args:
        recycler: has the model to measure.
        contexts: tokens in the cache. None: those of ``CONTEXTS`` that fit the model.
        sizes: tokens verified; must include 1.
        rounds: rounds per context.
        on_progress: called with (rounds done, total rounds).

    Raises:
        TokenRecyclingError: the model is decoded plainly, or a context or size is out of range.
    """
    target = recycler.target
    if not isinstance(target, TreeTarget):
        raise TokenRecyclingError("this model is decoded plainly; there is nothing to tune")
    room = longest(target)
    if contexts is None:
        contexts = [context for context in CONTEXTS if context <= room] or [room]
    contexts = sorted(set(contexts))
    sizes = sorted(set(sizes))
    if sizes[:1] != [1] or sizes[-1] > defaults.MOST_NODES + 1:
        raise TokenRecyclingError(
            f"sizes are {sizes}; they must be between 1 and {defaults.MOST_NODES + 1} and include 1"
        )
    if not contexts or contexts[0] < 1 or contexts[-1] > room:
        raise TokenRecyclingError(
            f"contexts are {contexts}; give one or more, each between 1 and {room}"
        )
    bench = _Bench(target)
    rows = []
    for index, context in enumerate(contexts):
        bench.read(context)

        def on_round(done: int, index: int = index) -> None:
            if on_progress is not None:
                on_progress(index * (rounds + 1) + done, len(contexts) * (rounds + 1))

        rows.append(_time_steps(bench, sizes, rounds, FEWEST, SECONDS, on_round))
    recycler.forget_context()
    today = str(datetime.now(timezone.utc).date())
    about = {**identity(target.model, target.device), "date": today}
    return CostCurve(tuple(sizes), tuple(contexts), tuple(rows), about=about)


def _time_steps(
    bench: _Bench,
    sizes: Sequence[int],
    rounds: int,
    fewest: int,
    limit: float,
    on_round: Callable[[int], None] = lambda done: None,
) -> tuple[float, ...]:
    """Return the median seconds of steps of each size, which take turns.

    Args:
        bench: has a context.
        sizes: tokens verified.
        rounds: most rounds, after one to warm up.
        fewest: rounds that are done regardless of time.
        limit: seconds after which no new round starts.
        on_round: called with the number of rounds done.
    """
    times: dict[int, list[float]] = {size: [] for size in sizes}
    begun = perf_counter()
    for round_ in range(rounds + 1):
        if round_ > fewest and perf_counter() - begun > limit:
            break
        turn = round_ % len(sizes)
        for size in (*sizes[turn:], *sizes[:turn]):
            seconds = bench.step(size)
            if round_:
                times[size].append(seconds)
        on_round(round_ + 1)
    return tuple(median(times[size]) for size in sizes)


@lru_cache
def _quick_curves() -> dict[str, CostCurve]:
    """Curves measured at load in this process, by ``identity``."""
    return {}


def measure_quickly(target: TreeTarget) -> CostCurve | None:
    """Measure steps of a few sizes, once per process, model shape and machine.

    Returns:
        None if steps take longer than ``QUICK_STEP``, or if the model cannot decode now.
    """
    key = json.dumps(identity(target.model, target.device), sort_keys=True)
    curves = _quick_curves()
    if key not in curves:
        if longest(target) < QUICK_CONTEXT or target.changed() is not None:
            return None
        bench = _Bench(target)
        bench.read(QUICK_CONTEXT)
        bench.step(1)
        if bench.step(1) > QUICK_STEP:
            target.reset()
            return None
        seconds = _time_steps(bench, QUICK_SIZES, QUICK_ROUNDS, 1, QUICK_SECONDS)
        target.reset()
        curves[key] = CostCurve(QUICK_SIZES, (QUICK_CONTEXT,), (seconds,))
    return curves[key]


def save_curve(recycler: HasTarget, curve: CostCurve) -> str:
    """Save the curve where automatic draft sizes look for it; return the path."""
    assert isinstance(recycler.target, TreeTarget)
    path = cached_path(identity(recycler.target.model, recycler.target.device))
    curve.save(path)
    return str(path)


class _Bench:
    """A target with a context, and timed steps after which the context is restored."""

    def __init__(self, target: TreeTarget) -> None:
        self.target = target
        vocab = target.vocab_size
        k = min(defaults.CANDIDATES, vocab)
        generator = torch.Generator().manual_seed(0)
        matrix = AdjacencyMatrix(vocab, k)
        rows = torch.randint(vocab, (vocab, k), generator=generator)
        matrix.update(torch.arange(vocab), rows)
        self.drafter = AdaptiveDrafter(matrix)
        self.accept = GreedyAcceptor()
        self.tokens = torch.randint(vocab, (10**5,), generator=generator).tolist()
        self.prompt: list[int] = []
        self.rows = self.drafter.new_rows(1)

    def read(self, context: int) -> None:
        """Fill the cache with random tokens."""
        prompt = [self.tokens[i % len(self.tokens)] for i in range(context)]
        self.target.prefill([prompt])
        self.drafter.load(self.rows, [prompt])
        self.prompt = prompt

    def step(self, size: int) -> float:
        """Time a step that verifies ``size`` tokens; return the seconds."""
        target = self.target
        with target.inference_context():
            synchronize(target.device)
            begin = perf_counter()
            root = torch.tensor(self.prompt[-1:], device="cpu")
            draft = self.drafter.propose(self.rows, root, size)
            logits = target.verify(draft)
            accepted = self.accept(draft, logits, [Text(self.prompt)])
            candidates = best_candidates(logits, self.drafter.k)
            self.drafter.observe(self.rows, draft, candidates, accepted)
            target.commit(accepted.path, [len(tokens) for tokens in accepted.tokens])
            synchronize(target.device)
            seconds = perf_counter() - begin
        target.cache.rewind([len(self.prompt)])
        return seconds


def identity(model: Any, device: torch.device) -> dict[str, Any]:
    """Return what a curve depends on: the model's shape and type, the device and its threads."""
    quantised = type(getattr(model, "hf_quantizer", None)).__name__
    return {
        "model": type(model).__name__,
        "config": config_digest(model.config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantiser": "" if quantised == "NoneType" else quantised,
        "attention": getattr(model.config, "_attn_implementation", None) or "eager",
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "torch": torch.__version__,
    }


def cached_path(about: dict[str, Any]) -> Path:
    """Return the path of the curve for ``about``, a result of ``identity``."""
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{about['model']}-{name}.json"


def find(model: Any, device: torch.device) -> CostCurve:
    """Return the curve saved by ``tune`` for this model and machine, or an assumed one."""
    path = cached_path(identity(model, device))
    if path.is_file():
        try:
            return CostCurve.load(path)
        except TokenRecyclingError as error:  # not fatal: tune rewrites the file
            warnings.warn(f"measured costs are ignored: {error}", stacklevel=2)
    return CostCurve.assumed(device.type)
