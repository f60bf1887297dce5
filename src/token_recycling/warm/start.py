"""Which warm rows a recycler starts with: those in the cache folder, or newly computed ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

from token_recycling import defaults
from token_recycling.drafting.matrix import AdjacencyMatrix, fingerprint
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.model.target import TreeTarget
from token_recycling.util.machine import synchronize
from token_recycling.util.modes import ordinary_tensors
from token_recycling.warm.context import choose, frequent_tokens
from token_recycling.warm.fill import OnProgress, fill
from token_recycling.warm.identity import weights_name
from token_recycling.warm.store import KEEP_SECONDS, WarmRows, find, keep_alias

# Rows and columns of the product that is timed to estimate the cost of a token.
PRODUCT = {"cpu": (64, 1024)}
PRODUCT_ELSEWHERE = (512, 4096)

logger = logging.getLogger(__name__)


def kept_rows(target: TreeTarget, tokenizer: Any, k: int, *, ignore: bool = False) -> WarmRows:
    """Return the rows in the cache folder; without any, or if they are ignored, an empty matrix."""
    name = weights_name(target.model)
    mark, size = fingerprint(tokenizer, target.vocab_size), target.vocab_size
    with ordinary_tensors():
        kept = None if ignore or name is None else find(name, size, k, mark)
        if kept is not None:
            return kept
        return WarmRows(AdjacencyMatrix(size, k, fingerprint=mark), None, name)


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
        force: compute all rows, kept or not.
        on_progress: called after every batch with (tokens done, total tokens).

    Returns:
        The rows, which may be none so far; None if ``warm`` is False. When the model fails, there
        is a warning, and the rows found so far are returned.
    """
    if warm is False:
        return None
    found = kept_rows(target, tokenizer, k, ignore=force)
    seconds, expected = None, found.rows.vocab_size
    if warm is not None and not isinstance(warm, bool):
        seconds = float(warm)
    wanted = not found.complete
    if wanted and warm is None:
        seconds = defaults.WARM_SECONDS
        expected = int(seconds * _tokens_per_second(target))
        missing = found.rows.vocab_size - found.rows.rows_seen
        first = found.path is None
        wanted = expected >= missing or (first and expected >= defaults.WARM_TOKENS)
    if wanted:
        go_on(found, target, tokenizer, seconds=seconds, expected=expected, on_progress=on_progress)
        logger.info(found.line)
    elif found.path is not None and found.name is not None:
        with suppress(TokenRecyclingError):  # the folder may have become read-only
            keep_alias(target.model, found.name)
        logger.info(
            "warm rows: %d of %d tokens from %s",
            found.rows.rows_seen,
            found.rows.vocab_size,
            found.path,
        )
    return found


def go_on(
    found: WarmRows,
    target: TreeTarget,
    tokenizer: Any,
    *,
    seconds: float | None = None,
    expected: int | None = None,
    stop: Callable[[], bool] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Compute missing rows, those of frequent tokens first.

    They are kept every ``KEEP_SECONDS`` and at the end, after an interruption too, unless ``stop``
    is given: a caller who may be asked for an answer at any time calls ``WarmRows.keep`` himself.

    Args:
        found: the rows so far, modified.
        target: the model.
        tokenizer: its tokenizer, or None.
        seconds: compute for at most so long; None: until all rows are there.
        expected: rows that this time is expected to give; None: all.
        stop: ends the computation when it returns True.
        on_progress: called after every batch with (tokens done, total tokens).
    """
    if found.complete or found.failed:
        return
    if reason := target.changed():
        logger.info("warm rows are not computed: %s", reason)
        return
    begun = perf_counter()
    before = found.rows.rows_seen
    failure = None

    def on_batch(done: int, total: int) -> None:
        if stop is None and perf_counter() - max(begun, found.saved_at) > KEEP_SECONDS:
            found.keep(target.model)
        if on_progress is not None:
            on_progress(done, total)

    try:
        if found.context is None:
            most = expected or found.rows.vocab_size
            chosen = choose(target, tokenizer, found.rows.k, most, stop)
            if chosen is None:
                return
            found.context, scores = chosen
            logger.info("warm rows: context %s, scores %s", found.context.name, scores)
        special = getattr(tokenizer, "all_special_ids", None) or ()
        done = fill(
            target,
            found.rows,
            prefix=found.context.tokens,
            tokens=(*found.context.tokens, *special, *frequent_tokens(tokenizer)),
            seconds=None if seconds is None else seconds - (perf_counter() - begun),
            stop=stop,
            on_progress=on_batch,
        )
        found.complete, failure = done.complete, done.failure
    except Exception as error:  # whatever the model's code or the tokenizer raises
        failure = f"{type(error).__name__}: {one_line(error, 160)}"
    finally:
        found.computed = found.rows.rows_seen - before
        found.seconds = perf_counter() - begun
        if stop is None and (found.computed or found.complete):
            found.keep(target.model)
    if failure is not None:
        found.failed = True
        warnings.warn(f"warm rows are not computed: {failure}", stacklevel=3)


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
