"""Measurement of the cost of a decoding step by tokens verified, once per model and machine."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from skinny_kernels.errors import one_line
from token_recycling import defaults
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.errors import TokenRecyclingError, warn_caller
from token_recycling.model.limits import config_digest
from token_recycling.model.target import TreeTarget
from token_recycling.util.files import cache_folder, is_file
from token_recycling.util.machine import device_name, synchronize
from token_recycling.version import __version__

logger = logging.getLogger(__name__)
CONTEXT = 64  # tokens in the cache
# Tokens verified. The measurement may end after any of them, so those that say most come first.
SIZES = (1, 8, 4, 16, 2, 32, 64)
ROUNDS = 5  # after steps to warm up
SECONDS = 1.0  # after which no step begins
LONGEST_STEP = 0.2  # seconds of a plain step; models that take longer are not measured


def measured_curve(target: TreeTarget) -> CostCurve:
    """Return the costs of steps of this model on this machine.

    They are those in the cache folder; else they are measured, within ``SECONDS`` and a step, and
    kept there. The context of ``target`` is dropped.

    Returns:
        An assumed curve if steps take longer than ``LONGEST_STEP`` or the model cannot decode now.
    """
    about = identity(target.model, target.device)
    path: Path | None = None
    try:
        path = cached_path(about)
    except TokenRecyclingError as error:  # no home
        logger.debug("Token Recycling: step costs are not kept: %s", one_line(error, 200))
    if path is not None and is_file(path):
        try:
            return CostCurve.load(path)
        except TokenRecyclingError as error:
            warn_caller(f"{error}; it is measured again")
    seconds = measure(target)
    if seconds is None:
        return CostCurve.assumed(target.device.type)
    curve = CostCurve(
        tuple(sorted(seconds)), tuple(seconds[n] for n in sorted(seconds)), about=about
    )
    if path is not None:
        with suppress(TokenRecyclingError):  # the folder may be read-only
            curve.save(path)
    return curve


def measure(target: TreeTarget) -> dict[int, float] | None:
    """Time whole steps (propose, verify, accept, observe, commit) on random tokens.

    The sizes take turns, so that temporary load on the machine affects all of them. The context of
    ``target`` is dropped.

    Returns:
        The median seconds by tokens verified, without sizes for which there was no time; None if
        plain steps take longer than ``LONGEST_STEP`` or the model cannot decode now.
    """
    deadline = perf_counter() + SECONDS
    limit = target.max_context
    if target.refused is not None or (limit is not None and limit < CONTEXT + max(SIZES)):
        return None
    steps = _Steps(target)
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    try:
        steps.read(1)  # the first forward after loading takes longest
        if steps.time(1) > LONGEST_STEP:
            return None
        steps.read(CONTEXT)
        for turn, size in enumerate(SIZES * ROUNDS):
            if perf_counter() > deadline and times[SIZES[1]]:
                break
            if turn < len(SIZES):
                steps.time(size)  # kernels are prepared and steps recorded
            times[size].append(steps.time(size))
    finally:
        target.reset()
    return {size: median(seconds) for size, seconds in times.items() if seconds}


class _Steps:
    """Timed steps of a target, after which its context is as before."""

    def __init__(self, target: TreeTarget) -> None:
        self.target = target
        vocab = target.vocab_size
        k = min(defaults.CANDIDATES, vocab)
        generator = torch.Generator().manual_seed(0)
        matrix = AdjacencyMatrix(vocab, k)
        rows = torch.arange(vocab, device="cpu")
        candidates = torch.randint(vocab, (vocab, k), generator=generator, device="cpu")
        matrix.update(rows, candidates)
        self.drafter = AdaptiveDrafter(matrix)
        self.accept = GreedyAcceptor()
        self.tokens = torch.randint(vocab, (CONTEXT,), generator=generator, device="cpu").tolist()
        self.prompt: list[int] = []
        self.rows = self.drafter.new_state(1)

    def read(self, context: int) -> None:
        """Fill the cache with random tokens."""
        self.prompt = self.tokens[:context]
        self.target.prefill([self.prompt])
        self.drafter.load(self.rows, [self.prompt])

    def time(self, size: int) -> float:
        """Return the seconds of a step that verifies ``size`` tokens."""
        target = self.target
        with target.inference_context():
            synchronize(target.device)
            begin = perf_counter()
            root = torch.tensor(self.prompt[-1:], device="cpu")
            draft = self.drafter.propose(self.rows, root, size)
            logits = target.verify(draft)
            candidates = best_candidates(logits, self.drafter.k)
            accepted, _ = self.accept(draft, logits, [Sequence(self.prompt)], candidates.best)
            self.drafter.observe(self.rows, draft, candidates, accepted)
            target.commit(accepted.path, accepted.counts.tolist())
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
        "token_recycling": __version__,
    }


def cached_path(about: dict[str, Any]) -> Path:
    """Return the path of the curve for ``about``, a result of ``identity``."""
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{about['model']}-{name}.json"
