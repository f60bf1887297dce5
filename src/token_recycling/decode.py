"""The decoding loop of Token Recycling: propose, verify, accept, observe, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from token_recycling.accept import Acceptor, Stop, bare_roots, overflowed, without_autocast
from token_recycling.drafters import Drafter
from token_recycling.engine import FusedEngine
from token_recycling.metrics import Step
from token_recycling.target import OnProgress, Target


def decode(
    target: Target,
    drafter: Drafter,
    accept: Acceptor,
    prompts: list[list[int]],
    stop: Stop,
    *,
    engine: FusedEngine | None = None,
    keep: int = 0,
    on_progress: OnProgress | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Step]:
    """Decode a batch of prompts; yield the prefill as the first ``Step``, then one per forward.

    The consumer may stop early: before a ``Step`` is yielded its tokens are committed, all but
    the last of each row, and nothing else is in the cache.

    Args:
        target: the model.
        drafter: what proposes.
        accept: what chooses tokens.
        prompts: B lists of tokens.
        stop: says after which token a row ends.
        engine: takes the steps as far as it can, all at once where this loop goes one by one.
        keep: tokens of a single prompt that the target has read before.
        on_progress: see ``Target.prefill``.
        check: called before every step; raises when the target was used for something else.

    Raises:
        TokenRecyclingError: a prompt is empty or longer than the context.
    """
    with target.guard():
        step = _read(target, drafter, accept, prompts, stop, keep, on_progress)
    active = [reason is None for reason in step.reasons]
    roots = [tokens[-1] for tokens in step.tokens]
    yield step
    if engine is not None:
        texts = [prompt + tokens for prompt, tokens in zip(prompts, step.tokens)]
        yield from engine.steps(texts, active, accept, stop, check)
        if any(active):
            with without_autocast(target.device):
                drafter.start([text[:-1] for text in texts])
            roots = [text[-1] for text in texts]
    while any(active):
        check()
        with target.guard():
            step = _advance(target, drafter, accept, roots, active, stop)
        active = [on and reason is None for on, reason in zip(active, step.reasons)]
        roots = [tokens[-1] if tokens else 0 for tokens in step.tokens]
        yield step


def _read(
    target: Target,
    drafter: Drafter,
    accept: Acceptor,
    prompts: list[list[int]],
    stop: Stop,
    keep: int,
    on_progress: OnProgress | None,
) -> Step:
    """Read the prompts and choose the first tokens."""
    begin = perf_counter()

    def wants(tokens: Tensor) -> Tensor | None:
        with without_autocast(target.device):
            return drafter.wants(tokens)

    def prime(tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        with without_autocast(target.device):
            drafter.prime(tokens, logits, valid)

    with without_autocast(target.device):
        drafter.start(prompts)
    logits = target.prefill(
        prompts, on_prompt=prime, wants=wants, on_progress=on_progress, keep=keep
    )
    ends = bare_roots(torch.tensor([prompt[-1] for prompt in prompts], device=target.device))
    accepted = accept(ends, logits[:, None], stop)
    seconds = (perf_counter() - begin,)
    return Step(accepted.tokens, accepted.reasons, accepted.drafted, 1, seconds)


def _advance(
    target: Target,
    drafter: Drafter,
    accept: Acceptor,
    roots: list[int],
    active: list[bool],
    stop: Stop,
) -> Step:
    """Take one step: the rows that are not ``active`` take part but emit and teach nothing."""
    laps = [perf_counter()]
    with without_autocast(target.device):
        draft = drafter.propose(torch.tensor(roots, device=target.device))
    if not all(active):
        draft = draft.only(torch.tensor(active, device=target.device))
    if target.device.type == "cpu":
        draft = draft.compact()
    laps.append(perf_counter())
    logits = target.verify(draft)
    if draft.nodes > 1 and bool(overflowed(logits)):
        # A draft that overflows spoils every node of the forward, which is masked by a weight of
        # 0, and 0 · NaN is NaN. Plain decoding would not have read it.
        draft = draft.first(1)
        target.clear_drafts()
        logits = target.verify(draft)
    laps.append(perf_counter())
    accepted = accept(draft, logits, stop)
    laps.append(perf_counter())
    with without_autocast(target.device):
        drafter.observe(draft, logits, accepted)
    laps.append(perf_counter())
    target.commit(accepted.path, [len(tokens) for tokens in accepted.tokens])
    laps.append(perf_counter())
    seconds = tuple(end - begin for begin, end in pairwise(laps))
    nodes = draft.tokens.shape[1]
    return Step(accepted.tokens, accepted.reasons, accepted.drafted, nodes, seconds)
