"""The decoding loop of Token Recycling: propose, verify, accept, observe, commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch
from torch import Tensor

from skinny_kernels.modes import without_autocast
from token_recycling.decoding.accept import Acceptor, overflowed
from token_recycling.decoding.metrics import Step
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.candidates import Candidates, best_candidates
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.size.base import DraftSize
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.base import OnProgress, Target

# (the drafter's state, draft, accepted), called at every step before the drafter learns from it
OnDraft = Callable[[Any, DraftTree, Accepted], None]


class GraphSteps(Protocol):
    """Runs steps as graphs (see ``graph.decoder.GraphDecoder``)."""

    def steps(
        self, sequences: list[Sequence], accept: Acceptor, check: Callable[[], None]
    ) -> Iterator[Step]:
        """Decode with graphs until the rows end or a graph cannot continue."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks during decoding.

    Attributes:
        check: called before every step; raises when the target has been used for something else.
        on_progress: called while the prompts are read (see ``Target.prefill``).
        on_draft: called with every draft and what was accepted of it; requires the eager loop.
    """

    check: Callable[[], None] = lambda: None
    on_progress: OnProgress | None = None
    on_draft: OnDraft | None = None


def read_prompts(
    target: Target,
    drafter: AnyDrafter,
    accept: Acceptor,
    sequences: list[Sequence],
    *,
    learns: bool = True,
    on_progress: OnProgress | None = None,
) -> Step:
    """Read the prompts of ``sequences`` and choose the first tokens.

    Args:
        target: reads the prompts; for a single row, its cache holds the first ``cached`` tokens.
        drafter: learns from the prompts.
        accept: chooses the tokens.
        sequences: the rows.
        learns: False: the drafter learns nothing, which saves time.
        on_progress: see ``Target.prefill``.

    Raises:
        TokenRecyclingError: a prompt is empty or longer than the context.
    """
    begin = perf_counter()
    learns = learns and drafter.prompts != "none"

    def prompt_mask(tokens: Tensor) -> Tensor | None:
        with without_autocast(target.device):
            return drafter.prompt_mask(tokens) if learns else None

    def learn_prompt(tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        with without_autocast(target.device):
            ranked = best_candidates(logits[..., : target.vocab_size], drafter.k)
            drafter.learn_prompt(tokens, ranked, mask)

    prompts = [list(sequence.tokens) for sequence in sequences]
    logits = target.prefill(
        prompts,
        prompt_mask=prompt_mask,
        learn_prompt=learn_prompt,
        whole_prompts=drafter.prompts == "whole",
        on_progress=on_progress,
        cached=sequences[0].cached,
    )
    ends = root_only(torch.tensor([prompt[-1] for prompt in prompts], device="cpu"))
    _, appended = accept(ends, logits[:, None], sequences)
    return Step(*appended, 1, (perf_counter() - begin,))


@dataclass
class Decoding:
    """One run of the decoding loop over B rows.

    Attributes:
        target: the model.
        drafter: proposes the drafts.
        draft_size: the draft-size policy.
        accept: chooses the tokens and appends them to the sequences.
        sequences: B rows.
        graph: runs steps as graphs as long as it can, before the eager loop; None: eager only.
        hooks: the caller's callbacks.
        state: the drafter's, of each row.
    """

    target: Target
    drafter: AnyDrafter
    draft_size: DraftSize
    accept: Acceptor
    sequences: list[Sequence]
    graph: GraphSteps | None = None
    hooks: Hooks = field(default_factory=Hooks)
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.drafter.new_state(len(self.sequences))

    def steps(self) -> Generator[Step, None, None]:
        """Read the prompts, then ``steps_after_prompts``; the first ``Step`` is the prefill.

        Raises:
            TokenRecyclingError: a prompt is empty or longer than the context.
        """
        self.load([list(sequence.tokens) for sequence in self.sequences])
        with self.target.inference_context():
            step = read_prompts(
                self.target,
                self.drafter,
                self.accept,
                self.sequences,
                learns=self.draft_size.pays,
                on_progress=self.hooks.on_progress,
            )
        yield step
        yield from self.steps_after_prompts()

    def steps_after_prompts(self) -> Generator[Step, None, None]:
        """Decode rows whose first token is chosen; yield one ``Step`` per forward.

        The consumer may stop early: when a ``Step`` is yielded, all its tokens but the last of
        each row are committed, and nothing else is in the cache.
        """
        if self.graph is not None:
            yield from self.graph.steps(self.sequences, self.accept, self.hooks.check)
            if self._active:
                self.load([sequence.tokens[:-1] for sequence in self.sequences])
        while self._active:
            self.hooks.check()
            with self.target.inference_context():
                step = self._advance()
            rows = len(step.tokens)
            # Other programs change what a step takes, but not which size is the best one.
            seconds = sum(step.seconds) - step.lost_seconds if self.target.is_warm else None
            self.draft_size.record(rows, rows * (step.size - 1), step.mean_emitted, seconds)
            yield step

    @property
    def _active(self) -> bool:
        return any(sequence.active for sequence in self.sequences)

    def load(self, texts: list[list[int]]) -> None:
        """Start the draft-size policy and the drafter with these tokens per row."""
        self.draft_size.begin(len(texts))
        with without_autocast(self.target.device):
            self.drafter.load(self.state, texts)

    def _advance(self) -> Step:
        """Take one step; rows that have ended are computed too but emit and teach nothing."""
        target, drafter = self.target, self.drafter
        timestamps, begun = [perf_counter()], thread_time()
        draft = self._propose()
        timestamps.append(perf_counter())
        logits = target.verify(draft)
        timestamps.append(perf_counter())
        candidates = self._ranked(logits)
        is_certain = drafter.k > 0 and bool(candidates.finite.all())
        if draft.size > 1 and not is_certain and bool(overflowed(logits)):
            # A drafted token whose activations overflow makes every node of the forward NaN,
            # since masked entries get a weight of 0 and 0 * NaN is NaN. Plain decoding would not
            # have read that token, so verify the root alone.
            draft = draft.first(1)
            target.clear_drafts()
            logits = target.verify(draft)
            candidates = self._ranked(logits)
        # Other devices may rank equal logits in another order than ``greedy``.
        ranks_all = logits.is_cpu and logits.shape[-1] == target.vocab_size
        active = [sequence.active for sequence in self.sequences]
        accepted, appended = self.accept(
            draft, logits, self.sequences, candidates.best if ranks_all else None
        )
        timestamps.append(perf_counter())
        if any(on and not new for on, new in zip(active, appended.tokens)):  # nor would the next
            raise TokenRecyclingError(f"a step with a draft of {drafter.name} has emitted no token")
        if self.hooks.on_draft is not None:
            self.hooks.on_draft(self.state, draft, accepted)
        with without_autocast(target.device):
            drafter.observe(self.state, draft, candidates, accepted)
        timestamps.append(perf_counter())
        target.commit(accepted.path, accepted.counts.tolist())
        timestamps.append(perf_counter())
        seconds = tuple(end - begin for begin, end in pairwise(timestamps))
        lost = max(0.0, sum(seconds) - (thread_time() - begun))
        return Step(*appended, draft.size, seconds, lost if target.device.type == "cpu" else 0.0)

    def _ranked(self, logits: Tensor) -> Candidates:
        """Return the best candidates after each node."""
        with without_autocast(self.target.device):
            return best_candidates(logits[..., : self.target.vocab_size], self.drafter.k)

    def _propose(self) -> DraftTree:
        """Return the draft to verify."""
        # Rows that have ended get a root too, but their nodes are marked invalid below.
        roots = torch.tensor([sequence.tokens[-1] for sequence in self.sequences], device="cpu")
        with without_autocast(self.target.device):
            draft = self.drafter.propose(self.state, roots, self.draft_size.limit()).to("cpu")
        active = [sequence.active for sequence in self.sequences]
        if not all(active):
            draft = draft.only(torch.tensor(active, device="cpu"))
        deepest = self.target.deepest()
        if deepest is not None:
            draft = draft.down_to(deepest)
        return draft.first(self.draft_size.choose(draft)).compact()
