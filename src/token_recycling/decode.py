"""The decoding loop of Token Recycling: propose, verify, accept, observe, commit."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch

from token_recycling.accept import Acceptor, Stop, bare_roots
from token_recycling.drafters import Drafter
from token_recycling.metrics import Step
from token_recycling.target import OnProgress, Target


def decode(
    target: Target,
    drafter: Drafter,
    accept: Acceptor,
    prompts: list[list[int]],
    stop: Stop,
    *,
    keep: int = 0,
    on_progress: OnProgress | None = None,
) -> Iterator[Step]:
    """Decode a batch of prompts; yield the prefill as the first ``Step``, then one per forward.

    The consumer may stop early: before a ``Step`` is yielded its tokens are committed, all but
    the last of each row, and nothing else is in the cache.

    Args:
        target: the model.
        drafter: what proposes.
        accept: what chooses tokens.
        prompts: B lists of tokens; B matrix rows are shared by all.
        stop: says after which token a row ends.
        keep: tokens of a single prompt that the target has read before.
        on_progress: see ``Target.prefill``.

    Raises:
        TokenRecyclingError: a prompt is empty or longer than the context.
    """
    clock = perf_counter()
    drafter.start(prompts)
    on_prompt = drafter.prime if drafter.wants_prompt else None
    logits = target.prefill(prompts, on_prompt=on_prompt, on_progress=on_progress, keep=keep)
    ends = bare_roots(torch.tensor([prompt[-1] for prompt in prompts], device=target.device))
    accepted = accept(ends, logits[:, None], stop)
    yield Step(accepted.tokens, accepted.reasons, [0] * len(prompts), 1, _lap([clock]))

    active = [reason is None for reason in accepted.reasons]
    roots = torch.tensor([tokens[-1] for tokens in accepted.tokens], device=target.device)
    while any(active):
        laps = [perf_counter()]
        draft = drafter.propose(roots)
        if not all(active):
            draft = draft.only(torch.tensor(active, device=target.device))
        if target.device.type == "cpu":
            draft = draft.compact()
        laps.append(perf_counter())
        logits = target.verify(draft)
        laps.append(perf_counter())
        accepted = accept(draft, logits, stop)
        laps.append(perf_counter())
        drafter.observe(draft, logits, accepted)
        laps.append(perf_counter())
        target.commit(accepted.path, [len(tokens) for tokens in accepted.tokens])
        nodes = draft.tokens.shape[1]
        yield Step(accepted.tokens, accepted.reasons, accepted.drafted, nodes, _lap(laps))

        active = [on and r is None for on, r in zip(active, accepted.reasons)]
        last = [tokens[-1] if tokens else 0 for tokens in accepted.tokens]
        roots = torch.tensor(last, device=target.device)


def _lap(marks: list[float]) -> tuple[float, ...]:
    """Seconds between the marks and from the last one to now."""
    return tuple(b - a for a, b in zip(marks, [*marks[1:], perf_counter()]))
