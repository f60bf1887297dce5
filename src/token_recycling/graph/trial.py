"""Trying a captured step before it is used: is it right, and can it pay.

A step that takes longer than an eager step of one token cannot: the eager loop would emit as many
tokens in less time, even without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.draft import root_only
from token_recycling.graph.step import GraphStep
from token_recycling.util.machine import median_seconds
from token_recycling.util.tokens import NO_TOKEN

TIES = 4  # roundings of the largest logit within which tokens are all but tied
TIMED = 3  # steps of each kind
Run = Callable[[], Tensor]


def problem(
    step: GraphStep,
    replay: Run,
    sequences: list[Sequence],
    generators: list[torch.Generator],
    is_graph: bool,
) -> str | None:
    """Return in one line why a captured step must not be used, or None; restore what it changed.

    Two steps are compared with eager ones: the second shows what the first one has committed.

    Args:
        step: what was captured.
        replay: runs it.
        sequences: the rows; the last token of each has not been read yet.
        generators: of the sampled rows.
        is_graph: whether ``replay`` runs a graph, whose time is compared too.
    """
    if not _agrees(step, replay, sequences, generators):
        return "steps of the graph differ from the same steps without it"
    return _slower(step, replay, sequences) if is_graph else None


def _agrees(
    step: GraphStep, replay: Run, sequences: list[Sequence], generators: list[torch.Generator]
) -> bool:
    """Return True if two steps give the same as eager ones, but for what rounding explains."""
    matrix = step.drafting.drafter.matrix
    learnt = None if matrix is None else matrix.state()

    def restore() -> None:
        if matrix is not None and learnt is not None:
            matrix.restore(learnt)
        step.begin(sequences, generators)

    def from_the_start(run: Run) -> Tensor:
        restore()
        step.chooser.draw([2 * step.most] * len(sequences))
        try:
            return run()
        finally:
            step.chooser.rewind([0] * len(sequences))

    def two_steps(run: Run) -> Run:
        return lambda: torch.stack([step.take(run), step.take(run)])

    eager, replayed = from_the_start(two_steps(step.run)), from_the_start(two_steps(replay))
    same = replayed.equal(eager)
    if not same and step.chooser.exact:
        same = _all_but_tied(step, from_the_start, eager, replayed)
    elif not same:  # rounding can change a sampled token of half precision
        same = step.target.dtype != torch.float32
    restore()
    return same


def _all_but_tied(
    step: GraphStep, from_the_start: Callable[[Run], Tensor], eager: Tensor, replayed: Tensor
) -> bool:
    """Return True if the first tokens that differ have logits that rounding can exchange."""
    differs = 0 if not replayed[0].equal(eager[0]) else 1  # the first step that does
    logits = from_the_start(step.logits if not differs else lambda: (step(), step.logits())[1])
    eager, replayed = eager[differs], replayed[differs]
    # What the first step has learnt is rounded too, so that the second may draft less or more.
    drafts_differ = differs == 1 and step.target.dtype != torch.float32
    for row, (eager_row, replayed_row) in enumerate(zip(eager.tolist(), replayed.tolist())):
        tokens = range(1, len(eager_row))  # behind the number of drafted ones
        first = next((i for i in tokens if eager_row[i] != replayed_row[i]), None)
        if first is None:
            continue
        if NO_TOKEN in (eager_row[first], replayed_row[first]):
            if drafts_differ:
                continue  # one text is the beginning of the other
            return False
        row_logits = logits[row].float()
        gaps = (row_logits[:, eager_row[first]] - row_logits[:, replayed_row[first]]).abs()
        noise = TIES * torch.finfo(step.target.dtype).eps * row_logits.abs().amax(dim=1)
        # The node is not known here, so that some node must have this tie.
        if not bool((gaps <= noise).any()):
            return False
    return True


def _slower(step: GraphStep, replay: Run, sequences: list[Sequence]) -> str | None:
    """Return in one line that a step takes longer than an eager plain one, or None."""
    target = step.target
    step.active.zero_()  # nothing is committed or learnt
    read = sequences[: len(target.cache.lengths)]  # without those that only pad the step
    roots = root_only(torch.tensor([sequence.tokens[-1] for sequence in read], device="cpu"))
    captured = median_seconds(lambda: step.take(replay), target.device, TIMED)
    plain = median_seconds(lambda: target.verify(roots), target.device, TIMED)
    if captured <= plain:
        return None
    return (
        f"a captured step of {step.size} tokens takes {captured * 1e3:.1f} ms and a plain step "
        f"of the eager loop {plain * 1e3:.1f} ms"
    )
