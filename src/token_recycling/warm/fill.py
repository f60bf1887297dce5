"""Fills rows of a matrix with what the model predicts after each token on its own.

N-Grammys (Stewart et al., arXiv 2411.03786) draft from such bigrams of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.errors import one_line
from token_recycling.model.target import TreeTarget
from token_recycling.util.machine import synchronize
from token_recycling.util.modes import ordinary_tensors

FIRST_BATCH = 32  # tokens
BATCH_SECONDS = 0.25  # batches grow while two of them take less
STOPPABLE_BATCH, STOPPABLE_SECONDS = 8, 0.05  # the same for a call that can be stopped
LOGIT_BYTES = 2**28  # of the logits of a batch and their float32 copy

# (tokens done, total tokens)
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Filled:
    """What a call of ``fill`` did.

    Attributes:
        computed: rows written.
        complete: every token was tried; False if the time was used up, the call was stopped, or the
            model failed.
        seconds: time taken.
        failure: why the model failed, as one line; None if it did not.
    """

    computed: int
    complete: bool
    seconds: float
    failure: str | None = None


def fill(
    target: TreeTarget,
    matrix: AdjacencyMatrix,
    *,
    prefix: tuple[int, ...] = (),
    tokens: Iterable[int] = (),
    seconds: float | None = None,
    stop: Callable[[], bool] | None = None,
    on_progress: OnProgress | None = None,
) -> Filled:
    """Fill the rows of tokens that have none; rows that exist are never changed.

    Each token is a text of its own, ``prefix`` and the token, without a cache. The k best
    candidates of the logits after it, with their softmax over these k, become its row. After
    ``tokens``, lower ids come first, which are the more frequent tokens of most vocabularies.
    Tokens whose logits are not finite get no row.

    Args:
        target: the model; its cache is neither used nor changed.
        matrix: with the target's vocabulary.
        prefix: tokens in front of each token.
        tokens: ids to fill first.
        seconds: no batch starts after this time; None: no limit.
        stop: no batch starts after it has returned True; batches are small then.
        on_progress: called after every batch with (tokens done, total tokens).

    Returns:
        What was done. A failure of the model, of whatever kind, ends the call without an error.
    """
    begun = perf_counter()
    missing = _missing(matrix, tokens)
    most = largest_batch(target, len(prefix) + 1)
    first, wanted = FIRST_BATCH, BATCH_SECONDS
    if stop is not None:
        first, wanted = STOPPABLE_BATCH, STOPPABLE_SECONDS
    size, done, computed = min(first, most), 0, 0
    failure = None
    while done < len(missing):
        start = perf_counter()
        if seconds is not None and start - begun >= seconds:
            break
        if stop is not None and stop():
            break
        batch = missing[done : done + size]
        try:
            computed += _fill_batch(target, matrix, prefix, batch)
            synchronize(target.device)
        except Exception as error:  # whatever the model's code raises, out of memory included
            failure = f"{type(error).__name__}: {one_line(error, 160)}"
            break
        done += len(batch)
        took = perf_counter() - start
        if took < wanted / 2:
            size = min(2 * size, most)
        elif took > 2 * wanted:
            size = max(1, size // 2)
        if on_progress is not None:
            on_progress(done, len(missing))
    complete = failure is None and done == len(missing)
    return Filled(computed, complete, perf_counter() - begun, failure)


def after(target: TreeTarget, prefix: tuple[int, ...], tokens: Tensor) -> Tensor:
    """Return the logits [n, V] after ``prefix`` and each of ``tokens`` (int64 [n])."""
    front = torch.tensor(prefix, dtype=torch.long, device=tokens.device)
    texts = torch.cat([front.expand(len(tokens), -1), tokens[:, None]], dim=1)
    return target.read_independent(texts, last=True)[:, -1]


def _missing(matrix: AdjacencyMatrix, first: Iterable[int]) -> Tensor:
    """Return the tokens that have no row, int64 [n]: those of ``first``, then the others by id."""
    size = matrix.vocab_size
    chosen = [token for token in dict.fromkeys(first) if 0 <= token < size]
    every = torch.cat(
        [torch.tensor(chosen, dtype=torch.long, device="cpu"), torch.arange(size, device="cpu")]
    )
    twice = torch.zeros(len(every), dtype=torch.bool)
    twice[len(chosen) :][chosen] = True
    every = every[~twice]
    return every[~matrix.seen(every)]


def largest_batch(target: TreeTarget, length: int) -> int:
    """Return how many texts of ``length`` tokens keep their logits within ``LOGIT_BYTES``."""
    entries = target.vocab_size * (1 if target.slices_logits else length)
    return max(1, LOGIT_BYTES // (entries * (target.dtype.itemsize + 4)))


def _fill_batch(
    target: TreeTarget, matrix: AdjacencyMatrix, prefix: tuple[int, ...], tokens: Tensor
) -> int:
    """Fill the rows of ``tokens`` (int64 [n]); return how many were written."""
    with target.inference_context():
        logits = after(target, prefix, tokens.to(target.device))
        found = best_candidates(logits[:, : matrix.vocab_size], matrix.k)
    ids, probabilities, finite = map(torch.from_numpy, found)
    with ordinary_tensors():
        matrix.update(tokens, ids, probabilities, finite)
    return int(finite.sum())
