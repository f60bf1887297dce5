"""The answers of a recycler, one after another: what they share, and which may continue."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from skinny_kernels.errors import one_line
from skinny_kernels.recordings import TILE_TOKENS
from token_recycling.decoding.accept import Acceptor
from token_recycling.decoding.cost_measurement import measured_curve
from token_recycling.decoding.loop import Decoding, Hooks
from token_recycling.decoding.metrics import Stats, Step
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.checked import CheckedDrafter, checked
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.registry import make_drafter
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.drafting.size.base import DraftSize, FixedSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.errors import GraphError, TokenRecyclingError
from token_recycling.graph.decoder import GraphDecoder, can_capture
from token_recycling.hf.call import CallOptions
from token_recycling.model.base import Target
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.prefix_cache import PrefixCache
from token_recycling.model.target import TreeTarget
from token_recycling.options import Options

logger = logging.getLogger(__name__)
Steps = Generator[Step, None, None]


def drafter_and_size(
    options: Options, target: Target, matrix: AdjacencyMatrix, template: TreeTemplate | None
) -> tuple[AnyDrafter, DraftSize]:
    """Return the drafter and the draft-size policy that ``options`` ask for.

    Args:
        options: of the recycler.
        target: the model.
        matrix: the drafter's.
        template: the tree that it fills; None if it shapes its own.

    Raises:
        TokenRecyclingError: there is no such drafter.
    """
    if isinstance(target, PlainTarget):
        return NoDrafter(), FixedSize()
    given = options.nodes
    if not isinstance(options.drafter, str):
        size = FixedSize(None if given is None else given + 1)
        return checked(options.drafter, target.vocab_size), size
    drafter = checked(make_drafter(options.drafter, matrix, template, given), target.vocab_size)
    drafter.prompts = options.prompts or drafter.prompts
    if given is not None:
        return drafter, FixedSize(given + 1)
    if not drafter.acceptance:
        return drafter, FixedSize()
    assert isinstance(target, TreeTarget)
    # Captured steps cost less than the eager ones that would be measured.
    captured = target.device.type == "cuda" and options.graphs_on(target.device)
    costs = CostCurve.assumed("cuda") if captured else measured_curve(target)
    multiple = TILE_TOKENS if target.device.type == "cpu" else 1
    return drafter, AutoSize(drafter.acceptance, costs, multiple, captured=captured)


DEFAULTS = CallOptions()


@dataclass
class Session:
    """The answers of one recycler, of which only the latest may continue.

    Attributes:
        target: the model.
        drafter: proposes the drafts.
        draft_size: the draft-size policy.
        options: of the recycler.
        template: the tree that the drafter fills; None if it shapes its own.
        latest: number of the answer that began last.
        stats: the sum over all answers.
    """

    target: Target
    drafter: AnyDrafter
    draft_size: DraftSize
    options: Options
    template: TreeTemplate | None
    latest: int = 0
    stats: Stats = field(default_factory=Stats)
    _graph: GraphDecoder | None = field(default=None, init=False)
    _prefix: PrefixCache | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the context and the graphs."""
        return {**self.__dict__, "_graph": None, "_prefix": None}

    @property
    def graphs(self) -> bool:
        """Whether steps run as graphs where they can."""
        return self.options.graphs_on(self.target.device)

    @property
    def largest_draft(self) -> int:
        """Most nodes of a draft, root included; of another package's drafter, so far."""
        if self.options.nodes is not None:
            return self.options.nodes + 1
        if isinstance(self.drafter, CheckedDrafter):
            return self.drafter.largest
        return self.drafter.full_size if self.template is None else self.template.size

    @property
    def described_size(self) -> str:
        """The size or tree of the drafts in words."""
        if self.options.nodes is not None:
            return f"{self.options.nodes} nodes"
        if isinstance(self.draft_size, AutoSize):
            return "draft size chosen automatically"
        if isinstance(self.drafter, NoDrafter):
            return "no drafts"
        own = isinstance(self.drafter, CheckedDrafter) and self.options.tree is None
        return "whole drafts" if own or self.template is None else f"tree {self.template.name}"

    def forget(self) -> None:
        """Free the context; no answer that has begun may continue."""
        self.target.reset()
        self._prefix = None
        self.latest += 1

    def decode(
        self,
        sequences: list[Sequence],
        accept: Acceptor,
        options: CallOptions = DEFAULTS,
        *,
        plain: bool = False,
        keep: bool = False,
    ) -> Steps:
        """Decode rows with the given acceptor (see ``Decoding``) and update the statistics.

        No step is computed before the generator is advanced. ``TokenRecycling.check_model`` must
        have been called.

        Args:
            sequences: the rows; for a single row, ``cached`` says how many prompt tokens the
                target has read already.
            accept: chooses the tokens.
            options: of them ``keep_context``, ``on_progress`` and ``on_draft``.
            plain: decode without trees, as the model does for ``generate``.
            keep: let the next answer continue what the target has read of a single row.

        Raises:
            TokenRecyclingError: a prompt cannot be read, or another answer has begun meanwhile.
        """
        self.latest += 1
        number, adoptions = self.latest, self.target.adoptions

        def check() -> None:
            if self.latest != number:
                raise TokenRecyclingError(
                    "this answer cannot continue: the model has begun another one or was reset"
                )
            if not plain and self.target.adoptions != adoptions:
                raise TokenRecyclingError("this answer cannot continue: the model has changed")

        hooks = Hooks(check, options.on_progress, options.on_draft)
        prefix, self._prefix = self._prefix, None
        if plain:
            target = PlainTarget(self.target.model, self.target.lm_head)
            decoding = Decoding(target, NoDrafter(), FixedSize(), accept, sequences, None, hooks)
        else:
            if options.keep_context and len(sequences) == 1 and prefix is not None:
                sequences[0].cached = prefix.common(sequences[0].tokens[:-1])
            captures = options.on_draft is None and can_capture(accept)
            graph = self.graph_decoder() if captures else None
            decoding = Decoding(
                self.target, self.drafter, self.draft_size, accept, sequences, graph, hooks
            )
        with suppress(GeneratorExit), closing(decoding.steps()) as steps:  # an abandoned stream
            for step in steps:
                for row, sequence in enumerate(sequences):
                    read = sequence.prompt_length - sequence.cached
                    for stats in (sequence.stats, self.stats):
                        stats.add(step, row, prompt_tokens=read)
                yield step
        if keep and not plain and self.latest == number and isinstance(self.target, TreeTarget):
            (sequence,) = sequences
            if sequence.new_length:
                self._prefix = PrefixCache(self.target, sequence.tokens[:-1])

    def warm(self, rows: Iterable[int], sizes: Iterable[int], seconds: float) -> bool:
        """Prepare the first steps on a GPU (see ``TokenRecycling.warm``); return whether it did."""
        graph = self.graph_decoder()
        if graph is None or self.target.device.type != "cuda":
            return False
        self.forget()
        try:
            graph.warm(rows, sizes, seconds)
        except Exception as error:  # of the device; the first answer says why
            logger.debug("steps are not prepared: %s", one_line(error, 200))
            return False
        return True

    def graph_decoder(self) -> GraphDecoder | None:
        """Return the decoder that runs steps as graphs, or None for the eager loop."""
        if not (self.graphs and isinstance(self.target, TreeTarget)):
            return None
        if self._graph is None or self._graph.drafter is not self.drafter:
            try:
                self._graph = GraphDecoder(self.target, self.drafter, self.draft_size)
            except GraphError:
                return None
        return self._graph
