"""Which warm rows a recycler starts with: those in the cache folder, or newly computed ones."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from token_recycling import defaults
from token_recycling.drafting.matrix import AdjacencyMatrix, fingerprint
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.model.target import TreeTarget
from token_recycling.util.machine import synchronize
from token_recycling.util.modes import ordinary_tensors
from token_recycling.warm import store
from token_recycling.warm.context import NOTHING, WarmPrefix, choose, frequent_tokens
from token_recycling.warm.fill import OnProgress, fill

# Rows and columns of the product that is timed to estimate the cost of a token.
PRODUCT = {"cpu": (64, 1024)}
PRODUCT_ELSEWHERE = (512, 4096)
KEEP_SECONDS = 60.0  # of computation, after which the rows are written

logger = logging.getLogger(__name__)


@dataclass
class WarmRows:
    """The rows that a recycler starts with, and how they were made.

    Attributes:
        rows: a matrix without rows of pairs.
        context: what was in front of each token: "nothing", "bos", "newline" or "assistant".
        prefix: its tokens; None if it has not been chosen yet.
        name: of their file (see ``store.weights_name``); None if the weights cannot be identified.
        computed: rows computed by the last call of ``warm_up``; the others existed before.
        complete: every token of the vocabulary was tried.
        failed: the model failed; nothing more is computed.
        seconds: time taken by that computation, 0.0 if there was none.
        path: their file; None if they could not be kept.
        unkept: why they could not be kept; None if they are.
        saved: rows in the file.
        saved_at: when it was written, by ``perf_counter``; 0.0 if not by this object.
    """

    rows: AdjacencyMatrix
    context: str
    prefix: tuple[int, ...] | None
    name: str | None
    computed: int = 0
    complete: bool = False
    failed: bool = False
    seconds: float = 0.0
    path: Path | None = None
    unkept: str | None = None
    saved: int = 0
    saved_at: float = 0.0

    @property
    def is_due(self) -> bool:
        """True if there are rows to write, and all are there or the last time was a while ago."""
        late = self.complete or perf_counter() - self.saved_at > KEEP_SECONDS
        return late and self.rows.rows_seen > self.saved

    def keep_new(self, model: Any) -> None:
        """Call ``keep`` if there are rows that are not in the file."""
        if self.rows.rows_seen > self.saved:
            self.keep(model)

    @property
    def line(self) -> str:
        """What was done, as one line."""
        kept = f"kept in {self.path}" if self.path else f"not kept ({self.unkept})"
        front = "" if self.context == NOTHING.name else f", context {self.context}"
        return (
            f"warm rows: {self.rows.rows_seen:,} of {self.rows.vocab_size:,} tokens"
            f"{front}, {self.computed:,} computed in {self.seconds:.1f} s, {kept}"
        )

    def keep(self, model: Any) -> None:
        """Write the rows of ``model`` to the cache folder; set ``path`` or ``unkept``."""
        self.saved, self.saved_at = self.rows.rows_seen, perf_counter()
        if self.name is None:
            self.unkept = "the weights cannot be identified"
            return
        try:
            context = WarmPrefix(self.context, self.prefix or ())
            self.path = store.keep(self.name, self.rows, context, self.complete)
            store.keep_alias(model, self.name)
            self.unkept = None
        except TokenRecyclingError as error:
            self.path, self.unkept = None, str(error)


def kept_rows(target: TreeTarget, tokenizer: Any, k: int, *, ignore: bool = False) -> WarmRows:
    """Return the rows in the cache folder; without any, or if they are ignored, an empty matrix."""
    name = store.weights_name(target.model)
    mark, size = fingerprint(tokenizer, target.vocab_size), target.vocab_size
    with ordinary_tensors():
        kept = None if ignore or name is None else store.find(name, size, k, mark)
        if kept is None:
            rows = AdjacencyMatrix(size, k, fingerprint=mark)
            return WarmRows(rows, NOTHING.name, None, name)
    return WarmRows(
        kept.rows,
        kept.context.name,
        kept.context.tokens,
        kept.name,
        complete=kept.complete,
        path=kept.path,
        saved=kept.rows.rows_seen,
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
            store.keep_alias(target.model, found.name)
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
        if found.prefix is None:
            most = expected or found.rows.vocab_size
            chosen = choose(target, tokenizer, found.rows.k, most, stop)
            if chosen is None:
                return
            context, scores = chosen
            found.context, found.prefix = context.name, context.tokens
            logger.info("warm rows: context %s, scores %s", context.name, scores)
        special = getattr(tokenizer, "all_special_ids", None) or ()
        done = fill(
            target,
            found.rows,
            prefix=found.prefix,
            tokens=(*found.prefix, *special, *frequent_tokens(tokenizer)),
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
