"""Which warm rows a recycler starts with: those in the cache folder, or newly computed ones."""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from token_recycling import defaults
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.machine import synchronize
from token_recycling.matrix import AdjacencyMatrix, fingerprint
from token_recycling.model.target import TreeTarget
from token_recycling.modes import ordinary_tensors
from token_recycling.warm import store
from token_recycling.warm.context import NOTHING, Context, choose
from token_recycling.warm.fill import Filled, OnProgress, fill

# Rows and columns of the product that is timed to estimate the cost of a token.
PRODUCT = {"cpu": (64, 1024)}
PRODUCT_ELSEWHERE = (512, 4096)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmRows:
    """The rows that a recycler starts with, and how they came about.

    Attributes:
        rows: a matrix without rows of pairs; never changed.
        context: what was in front of each token: "nothing", "bos", "newline" or "assistant".
        computed: rows computed now; the others are from the cache folder.
        complete: every token of the vocabulary was tried.
        seconds: time taken by the computation, 0.0 if there was none.
        path: their file; None if they could not be kept.
        unkept: why they could not be kept; None if they are.
    """

    rows: AdjacencyMatrix
    context: str
    computed: int
    complete: bool
    seconds: float
    path: Path | None
    unkept: str | None = None

    @property
    def line(self) -> str:
        """What was done, as one line."""
        kept = f"kept in {self.path}" if self.path else f"not kept ({self.unkept})"
        front = "" if self.context == NOTHING.name else f", context {self.context}"
        return (
            f"warm rows: {self.rows.rows_seen:,} of {self.rows.vocab_size:,} tokens"
            f"{front}, {self.computed:,} computed in {self.seconds:.1f} s, {kept}"
        )


def warm_up(
    target: TreeTarget,
    tokenizer: Any,
    k: int,
    warm: bool | float | None = True,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> WarmRows | None:
    """Load warm rows from the cache folder, compute missing ones, and keep them there.

    Args:
        target: the model.
        tokenizer: its tokenizer, or None.
        k: candidates per token.
        warm: see ``options.Options``; False: None is returned.
        force: compute all rows anew.
        on_progress: called after every batch with (tokens done, total tokens).

    Returns:
        The rows; None if there are none and none were computed. When the model fails, there is
        a warning, and the rows found so far are returned.
    """
    if warm is False:
        return None
    name = store.weights_name(target.model)
    mark, size = fingerprint(tokenizer, target.vocab_size), target.vocab_size
    with ordinary_tensors():
        kept = None if force or name is None else store.find(name, size, k, mark)
        rows = AdjacencyMatrix(size, k, fingerprint=mark) if kept is None else kept.rows
    seconds, expected = None, size
    if warm is not None and not isinstance(warm, bool):
        seconds = float(warm)
    begun = perf_counter()
    wanted = kept is None or not kept.complete
    if wanted and (reason := target.changed()):
        logger.info("warm rows are not computed: %s", reason)
        wanted = False
    if wanted and warm is None:
        seconds = defaults.WARM_SECONDS
        expected = int(seconds * _tokens_per_second(target))
        missing = size - rows.rows_seen
        wanted = expected >= missing or (kept is None and expected >= defaults.WARM_TOKENS)
    if not wanted:
        if kept is None:
            return None
        with suppress(TokenRecyclingError):  # the folder may have become read-only
            store.keep_alias(target.model, kept.name)
        logger.info("warm rows: %d of %d tokens from %s", rows.rows_seen, size, kept.path)
        return WarmRows(rows, kept.context.name, 0, kept.complete, 0.0, kept.path)
    context, done = _compute(target, tokenizer, rows, kept, seconds, expected, on_progress)
    took = perf_counter() - begun
    if done.failure is not None:
        warnings.warn(f"warm rows are not computed: {done.failure}", stacklevel=3)
    path, unkept = None if kept is None else kept.path, None
    if done.computed or done.complete:
        path, unkept = _keep(target.model, name, rows, context, done.complete)
    elif kept is None:
        return None
    found = WarmRows(rows, context.name, done.computed, done.complete, took, path, unkept)
    logger.info(found.line)
    return found


def _compute(
    target: TreeTarget,
    tokenizer: Any,
    rows: AdjacencyMatrix,
    kept: store.Kept | None,
    seconds: float | None,
    expected: int,
    on_progress: OnProgress | None,
) -> tuple[Context, Filled]:
    """Choose a context, unless the kept rows have one, and fill what is missing."""
    begun = perf_counter()
    context = NOTHING if kept is None else kept.context
    if kept is None:
        try:
            context, scores = choose(target, tokenizer, rows.k, min(expected, rows.vocab_size))
            logger.info("warm rows: context %s, scores %s", context.name, scores)
        except Exception as error:  # whatever the model's code or the tokenizer raises
            failure = f"{type(error).__name__}: {one_line(error, 160)}"
            return context, Filled(0, False, perf_counter() - begun, failure)
    if seconds is not None:
        seconds -= perf_counter() - begun
    first = getattr(tokenizer, "all_special_ids", None) or ()
    done = fill(
        target,
        rows,
        prefix=context.tokens,
        tokens=(*context.tokens, *first),
        seconds=seconds,
        on_progress=on_progress,
    )
    return context, done


def _keep(
    model: Any, name: str | None, rows: AdjacencyMatrix, context: Context, complete: bool
) -> tuple[Path | None, str | None]:
    """Keep the rows; return their file, or why they could not be kept."""
    if name is None:
        return None, "the weights cannot be identified"
    try:
        path = store.keep(name, rows, context, complete)
        store.keep_alias(model, name)
    except TokenRecyclingError as error:
        return None, str(error)
    return path, None


def _tokens_per_second(target: TreeTarget) -> float:
    """Estimate how many tokens on their own the model reads per second.

    The time of a matrix product gives the speed of the device. A token takes one multiplication
    per weight, without an embedding that is not the LM head too.
    """
    model = target.model
    weights = sum(int(parameter.numel()) for parameter in model.parameters())
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if embedding is not None and head is not embedding:
        weights -= int(embedding.numel())
    rows, width = PRODUCT.get(target.device.type, PRODUCT_ELSEWHERE)
    left = torch.zeros(rows, width, dtype=target.dtype, device=target.device)
    right = torch.zeros(width, width, dtype=target.dtype, device=target.device)
    seconds = float("inf")
    for _ in range(3):  # the first product may load a library
        synchronize(target.device)
        begun = perf_counter()
        left @ right
        synchronize(target.device)
        seconds = min(seconds, perf_counter() - begun)
    return rows * width * width / seconds / max(weights, 1)
