"""Choosing a token after every node of a draft on the device: the argmax, or with processors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from token_recycling.decoding.accept import (
    Acceptor,
    FollowAcceptor,
    GreedyAcceptor,
    greedy,
    overflowed,
)
from token_recycling.decoding.samplers import RowSampler, are_node_wise
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.draft import DraftTree
from token_recycling.util.tokens import NO_TOKEN

MANY = 256  # best tokens among which the k best and those tied with them are searched


@dataclass(frozen=True)
class TokenChoice:
    """How the token after a node is chosen; steps with equal choices can serve each other's texts.

    Attributes:
        settings: of the processors, which are compared by these.
        sampled: whether tokens are sampled; else the argmax is taken.
        processors: a ``LogitsProcessorList`` per row; None: there are none.
        seeded: the generator of every row if tokens are sampled; None: PyTorch's own one.
    """

    settings: str = ""
    sampled: bool = False
    processors: Listed[Any] | None = field(default=None, compare=False)
    seeded: Listed[torch.Generator | None] = field(default=(), compare=False)

    @classmethod
    def of(cls, accept: Acceptor) -> TokenChoice | None:
        """Return the choice of an acceptor, or None if a graph cannot make it.

        It can if choices need only logits, texts and random numbers that are drawn in advance.
        """
        if isinstance(accept, GreedyAcceptor):
            return cls()
        if not isinstance(accept, FollowAcceptor) or accept.on_choice is not None:
            return None
        sampler = accept.sampler
        seeded: tuple[torch.Generator | None, ...] = ()
        if sampler is not None:
            if not isinstance(sampler, RowSampler):
                return None
            seeded = tuple(sampler.generators)
            # Several rows without a seed share a generator, in the order in which they advance.
            if None in seeded and len(seeded) > 1:
                return None
        if not all(map(can_choose, accept.processors)):
            return None
        rows: Any = accept.processors
        settings = repr(
            [[(type(processor).__name__, vars(processor)) for processor in row] for row in rows]
        )
        return cls(settings, sampler is not None, rows, seeded)

    @property
    def is_argmax(self) -> bool:
        """Whether the argmax of the logits is chosen, without processors."""
        return self.processors is None

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Return the generator of every row; none where the argmax is taken."""
        return [generator or default_generator(device) for generator in self.seeded]

    def chooser(self, ahead: int, vocab_size: int, device: torch.device) -> _GreedyChooser:
        """Return what makes this choice, with ``ahead`` blocks of random numbers if it samples."""
        if self.processors is None:
            return _GreedyChooser()
        return NodeChooser(self.processors, ahead if self.sampled else 0, vocab_size, device)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that PyTorch draws from on a device where none is given."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def can_choose(processors: Any) -> bool:
    """Return True if a ``NodeChooser`` can apply all ``processors`` of a row."""
    if not isinstance(processors, list):
        return False
    return are_node_wise(processors[1:] if _penalty(processors) != 1.0 else processors)


def _penalty(processors: Any) -> float:
    """Return the repetition penalty that comes before all other processors; 1: none."""
    first: Any = next(iter(processors), None)
    if type(first) is not RepetitionPenaltyLogitsProcessor:
        return 1.0
    counts_prompt = getattr(first, "prompt_ignore_length", None) is None  # counts the prompt too
    return float(first.penalty) if counts_prompt else 1.0


class _GreedyChooser:
    """Chooses the argmax of the logits after every node of a draft, as a part of a step.

    A subclass may sample. A captured step cannot draw random numbers as it needs them, so ``draw``
    draws them before it, for more tokens than it may emit. Between steps others may draw from the
    same generators: ``rewind`` leaves them where plain sampling of the emitted tokens would, and
    ``resume`` takes them back. Counts are of tokens since ``begin``.

    Attributes:
        exact: whether rounding of logits can change only tokens that are all but tied.
    """

    exact = True

    def begin(self, sequences: list[Sequence], generators: Listed[torch.Generator]) -> None:
        """Continue these texts, and draw with these generators."""

    def draw(self, counts: Listed[int]) -> None:
        """Draw the random numbers of the first tokens of every row."""

    def rewind(self, counts: Listed[int]) -> None:
        """Leave the generators as plain sampling of so many tokens would."""

    def resume(self) -> None:
        """Undo ``rewind``."""

    def __call__(self, draft: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token after every node.

        Args:
            draft: B drafts of n nodes.
            logits: [B, n, V].

        Returns:
            The tokens int64 [B, n], and whether they cannot be used, bool [].
        """
        return greedy(logits), overflowed(logits)

    def advance(self, draft: DraftTree, accepted: Accepted) -> None:
        """Go on after the accepted tokens."""


class NodeChooser(_GreedyChooser):
    """Chooses a token after every node of a draft at once, sampled or the argmax.

    A sampled token depends on the node's position in the text: the exponential random numbers by
    which ``torch.multinomial`` would divide the weights of token t (block t, see ``BatchSampler``)
    are drawn before the step into a ring buffer. In a step after t tokens, a node of depth d uses
    block t + d. The longest path along these choices is therefore the text of plain sampling.

    On CUDA, processors after a top-k see only the best tokens, since top-p sorts what it sees. A
    repetition penalty comes before all others; for every node it counts the text and the node's
    ancestors.
    """

    exact = False

    def __init__(
        self, processors: Listed[Any], ahead: int, vocab_size: int, device: torch.device | str
    ) -> None:
        """Allocate a ring of ``ahead`` blocks per row.

        Args:
            processors: a ``LogitsProcessorList`` per row (see ``can_choose``).
            ahead: blocks in the ring; 0: take the argmax.
            vocab_size: V.
            device: that of the logits.
        """
        self._penalties = [_penalty(row) for row in processors]
        self._processors = [
            list(row)[penalty != 1.0 :] for row, penalty in zip(processors, self._penalties)
        ]
        batch = len(self._processors)
        self._blocks = torch.ones((batch, ahead, vocab_size), dtype=torch.float32, device=device)
        self._chosen = torch.zeros(batch, dtype=torch.long, device=device)  # tokens since ``begin``
        # Top-p removes one of two tied tokens. PyTorch sorts them by id on CUDA, of few tokens as
        # of many; on a CPU their order depends on the number of tokens.
        self._cuts = torch.device(device).type == "cuda"
        # Tokens of the text; the last column stands for those that the model has no logits of.
        self._seen: Tensor | None = None
        if any(penalty != 1.0 for penalty in self._penalties):
            self._seen = torch.zeros((batch, vocab_size + 1), dtype=torch.bool, device=device)
        self._generators: list[torch.Generator] = []
        self._states: list[deque[Tensor]] = []  # of the generators, as many draws back as are kept
        self._rewound: list[Tensor | None] = []  # of the generators, while others may draw
        self._drawn: list[int] = []  # blocks, per row

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self._blocks.shape[1] > 0

    def begin(self, sequences: list[Sequence], generators: Listed[torch.Generator]) -> None:
        """Continue these texts, and draw with these generators, one per row if tokens are sampled.

        The random numbers start at the generators' current states.
        """
        self._generators = list(generators)
        max_states = self._blocks.shape[1] + 1
        self._states = [
            deque([generator.get_state()], maxlen=max_states) for generator in self._generators
        ]
        self._rewound = [None] * len(self._generators)
        self._drawn = [0] * len(self._generators)
        self._chosen.zero_()
        if self._seen is not None:
            self._seen.zero_()
            for row, sequence in zip(self._seen, sequences):
                row[sequence.ids(row.device)[0].clamp(max=len(row) - 1)] = True

    def draw(self, counts: Listed[int]) -> None:
        """Draw the first blocks of every row; new ones overwrite the oldest in the ring."""
        ring = self._blocks.shape[1]
        for row, generator in enumerate(self._generators):
            if self._drawn[row] >= counts[row]:
                continue
            states = self._states[row]
            if not generator.get_state().equal(states[-1]):  # others have drawn: not behind that
                states.clear()
                states.append(generator.get_state())
            while self._drawn[row] < counts[row]:
                self._blocks[row, self._drawn[row] % ring].exponential_(generator=generator)
                states.append(generator.get_state())
                self._drawn[row] += 1

    def rewind(self, counts: Listed[int]) -> None:
        """Set every row's generator to its state after plain sampling of so many tokens.

        If others have drawn from it meanwhile, it stays as it is.
        """
        for row, generator in enumerate(self._generators):
            states, back = self._states[row], self._drawn[row] - counts[row] + 1
            if back <= len(states) and generator.get_state().equal(states[-1]):
                self._rewound[row] = states[-back]
                generator.set_state(states[-back])

    def resume(self) -> None:
        """Undo ``rewind``, unless others have drawn meanwhile."""
        for generator, rewound, states in zip(self._generators, self._rewound, self._states):
            if rewound is not None and generator.get_state().equal(rewound):
                generator.set_state(states[-1])

    def __call__(self, draft: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token after every node; they cannot be used if a forward overflowed.

        Nor can they if probabilities are not finite, or more tokens were tied with the last of the
        k best than ``MANY`` allows for.
        """
        rows = range(len(logits))
        chosen, wrong = zip(*(self._choose(row, draft, logits[row].float()) for row in rows))
        return torch.stack(chosen), torch.stack(wrong).any() | overflowed(logits)

    def _choose(self, row: int, draft: DraftTree, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token after every node of a row, from its logits float32 [n, V]."""
        if self._penalties[row] != 1.0:
            scores = self.penalised(row, draft, scores)
        tokens = None
        wrong = torch.zeros((), dtype=torch.bool, device=scores.device)
        for processor in self._processors[row]:
            if type(processor) is TopKLogitsWarper and self._cuts and tokens is None:
                count = min(max(MANY, 2 * processor.top_k), scores.shape[-1])
                outside = count < scores.shape[-1]
                scores, tokens = scores.topk(count)
                last = scores[:, -1]
                tied = (last == scores[:, min(processor.top_k, count) - 1]) & (last > -torch.inf)
                wrong = tied.any() & outside
                tokens, order = tokens.sort(dim=-1)  # in this order top-p removes tied tokens
                scores = scores.gather(1, order)
            scores = processor(None, scores)
        if self.samples:
            ring = self._blocks[row]
            block = (self._chosen[row] + draft.depths[row]) % len(ring)
            random = ring[block] if tokens is None else ring[block[:, None], tokens]
            weights = scores.softmax(dim=-1)
            wrong = wrong | ((weights >= 0).logical_not().any(dim=-1) & draft.valid[row]).any()
            scores = weights / random
        best = scores.argmax(dim=-1, keepdim=True)
        return (best if tokens is None else tokens.gather(1, best))[:, 0], wrong

    def penalised(self, row: int, draft: DraftTree, scores: Tensor) -> Tensor:
        """Apply the repetition penalty to the scores float32 [n, V] of the nodes of a row."""
        assert self._seen is not None
        penalty, vocab_size = self._penalties[row], scores.shape[-1]
        tokens = draft.tokens[row].clamp(max=vocab_size)
        path = torch.where(draft.ancestors[row], tokens[None, :], tokens[:1, None])
        seen = self._seen[row].expand(len(tokens), -1)
        seen = seen.scatter(1, path, torch.ones_like(path, dtype=torch.bool))[:, :vocab_size]
        other = torch.where(scores < 0, scores * penalty, scores / penalty)
        return torch.where(seen, other, scores)

    def advance(self, draft: DraftTree, accepted: Accepted) -> None:
        """Go on after the accepted tokens."""
        self._chosen.add_(accepted.counts)
        if self._seen is not None:
            new = torch.where(accepted.emitted == NO_TOKEN, draft.tokens[:, :1], accepted.emitted)
            new = new.clamp(max=self._seen.shape[1] - 1)
            self._seen.scatter_(1, new, torch.ones_like(new, dtype=torch.bool))
