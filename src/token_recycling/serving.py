"""Drafting for engines, whose batches change at every step: what all their adapters share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling import defaults
from token_recycling.accept import Accepted, chains
from token_recycling.adjacency import AdjacencyMatrix, fingerprint
from token_recycling.drafters import Drafter, make_drafter
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.tree import DraftTree, TreeTemplate

CONTEXT = 2048  # tokens of each request that are searched for what followed before
BUDGET = 256  # tokens that a step verifies at most, over all requests


@dataclass(frozen=True)
class ServingOptions:
    """What a user of an engine may set.

    Attributes:
        drafter: by name.
        tree: of the drafter, by name or file; None: as many nodes as the engine has room for.
        candidates: k of the matrix.
        matrix: file of a matrix to begin with.
        context: tokens of each request that are searched.
        budget: tokens that a step verifies at most, over all requests; drafts shrink with the
            batch and end where there would be nothing but roots.
    """

    drafter: str = defaults.DRAFTER
    tree: str | None = None
    candidates: int = defaults.CANDIDATES
    matrix: str | None = None
    context: int = CONTEXT
    budget: int = BUDGET

    @classmethod
    def parse(cls, given: dict[str, Any]) -> ServingOptions:
        """Read options, numbers as text too.

        Raises:
            TokenRecyclingError: there is no such option, or its value makes no sense.
        """
        known = {one.name: one for one in fields(cls)}
        for name in given:
            if name not in known:
                raise TokenRecyclingError(
                    f"no option {name!r} of Token Recycling; there are {', '.join(known)}"
                )
        values = dict(given)
        for name in ("candidates", "context", "budget"):
            try:
                values[name] = int(values.get(name, getattr(cls, name)))
            except (TypeError, ValueError):
                raise TokenRecyclingError(f"{name} is {values[name]!r}, no number") from None
        options = cls(**values)
        if options.context < 256:
            raise TokenRecyclingError(f"context is {options.context}; 256 tokens at least")
        if options.budget < 1:
            raise TokenRecyclingError(f"budget is {options.budget}; 1 token at least")
        return options

    @classmethod
    def from_environment(cls, prefix: str = "TOKEN_RECYCLING_") -> ServingOptions:
        """Read options from ``PREFIX_DRAFTER`` and so on.

        Raises:
            TokenRecyclingError: a value makes no sense.
        """
        found = {one.name: os.environ.get(prefix + one.name.upper()) for one in fields(cls)}
        return cls.parse({name: value for name, value in found.items() if value})

    def make(
        self,
        vocab_size: int,
        nodes: int,
        device: torch.device | str,
        tokenizer: Callable[[], Any] = lambda: None,
    ) -> Drafter:
        """Make the drafter.

        Args:
            vocab_size: of the engine's model.
            nodes: of a draft at most, below the root.
            device: of the matrix.
            tokenizer: loads the engine's tokenizer, to compare it with that of a matrix from a
                file; None: the engine has none.

        Raises:
            TokenRecyclingError: a file or name is not there, the matrix is another model's, or the
                drafter needs the host.
        """
        if self.matrix is None:
            matrix = AdjacencyMatrix(vocab_size, self.candidates)
        else:
            matrix = AdjacencyMatrix.load(self.matrix)
            name = fingerprint(tokenizer(), vocab_size) if matrix.fingerprint else ""
            matrix.check(vocab_size, name, what=f"the engine's model (file {self.matrix})")
        most = len(TreeTemplate.load("ranked", matrix.k).paths)
        template = TreeTemplate.load(self.tree or f"ranked-{min(nodes, most)}", matrix.k)
        if len(template.paths) > nodes:
            raise TokenRecyclingError(
                f"the tree {template.name} has {len(template.paths)} nodes below the root, the "
                f"engine room for {nodes}"
            )
        drafter = make_drafter(self.drafter, matrix.to(device), template)
        if not drafter.fixed_shapes:
            raise TokenRecyclingError(f"the drafter {self.drafter} needs the host at every step")
        return drafter

    def nodes_for(self, requests: int, most: int) -> int:
        """Nodes, the root included, of each draft in a step of so many requests."""
        return max(1, min(most, self.budget // max(requests, 1)))


def load_tokenizer(name: str | None, **options: Any) -> Any:
    """Load an engine's tokenizer by its name or path; None where it has none.

    Raises:
        TokenRecyclingError: it cannot be loaded.
    """
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # whatever a broken checkpoint makes the library raise
        line = one_line(error, 200)
        raise TokenRecyclingError(f"cannot load the tokenizer {name}: {line}") from error


class _Rows:
    """Tensors [requests, …] by name, made when first written."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.tensors: dict[str, Tensor] = {}

    def write(self, places: Tensor, rows: dict[str, Tensor]) -> None:
        for name, tensor in rows.items():
            if name not in self.tensors:
                self.tensors[name] = tensor.new_zeros(self.requests, *tensor.shape[1:])
            self.tensors[name][places] = tensor

    def read(self, places: Tensor) -> dict[str, Tensor]:
        return {name: tensor[places] for name, tensor in self.tensors.items()}


class RequestDrafter:
    """One drafter for many requests, any of them in a step.

    A request has a place, 0 to ``requests`` - 1, which the engine gives it. What belongs to it
    lies there from step to step, on the drafter's device; what is learnt is shared by all.
    """

    def __init__(
        self,
        drafter: Drafter,
        requests: int,
        nodes: int,
        device: torch.device | str,
        *,
        context: int = CONTEXT,
        chain: bool = False,
    ) -> None:
        """Draft for up to ``requests`` requests.

        Args:
            drafter: with ``fixed_shapes``.
            requests: places.
            nodes: of a draft at most, the root included.
            device: of the drafter.
            context: tokens of a request that it looks at.
            chain: of each draft propose only the branch that is likeliest.
        """
        self.drafter, self.nodes, self.context, self.chain = drafter, nodes, context, chain
        self.device = torch.device(device)
        self._rows, self._drafts = _Rows(requests), _Rows(requests)
        drafter.settle([[]], context)
        whole = drafter.propose(torch.zeros(1, dtype=torch.long, device=self.device))
        self.max_depth = min(whole.max_depth, nodes - 1)

    def begin(self, places: Tensor, texts: list[list[int]]) -> None:
        """Give ``places`` to requests: of each all tokens but the last, which is the next root."""
        self.drafter.settle([text[-self.context // 2 :] for text in texts], self.context)
        self._rows.write(places, self.drafter.held())

    def propose(self, places: Tensor, roots: Tensor, nodes: int) -> DraftTree:
        """Draft below ``roots`` int64 [B], the last tokens of the requests at ``places`` int64 [B].

        Args:
            places: each at most once.
            roots: not proposed for before.
            nodes: of each draft at most, the root included; 1: a step of plain decoding.
        """
        self.drafter.hold(self._rows.read(places))
        nodes = min(nodes, self.nodes)
        if self.chain and nodes > 1:
            draft = _likeliest(self.drafter.propose(roots)).first(nodes)
        else:
            draft = self.drafter.draft(roots, nodes)
        self._rows.write(places, self.drafter.held())
        self.keep(places, draft)
        return draft

    def keep(self, places: Tensor, draft: DraftTree) -> None:
        """Take ``draft`` for what was proposed at ``places``."""
        self._drafts.write(places, _padded(draft, self.nodes))

    def drafts(self, places: Tensor) -> DraftTree:
        """Return what was proposed last at ``places``, padded to the nodes of the largest draft."""
        return DraftTree(**self._drafts.read(places), max_depth=self.max_depth)

    def observe(self, places: Tensor, logits: Tensor, nodes: Tensor, emitted: Tensor) -> None:
        """Learn from a step.

        Args:
            places: int64 [B].
            logits: [B, n, V], the target's answers to the first n nodes of what was proposed.
            nodes: int64 [B], how many of them were verified, the root included.
            emitted: int64 [B, t], what each request got; ``accept.HOLE`` behind the last.
        """
        self.drafter.hold(self._rows.read(places))
        draft = self.drafts(places).first(logits.shape[1]).up_to(nodes)
        counts = (emitted >= 0).sum(dim=1)
        self.drafter.observe(draft, logits, Accepted(torch.zeros_like(emitted), emitted, counts))
        self._rows.write(places, self.drafter.held())


def packed_draft(draft: DraftTree) -> Tensor:
    """Put a draft into one tensor, int64 [B, 4 + n, n], to be sent to other ranks."""
    parts = [draft.tokens, draft.parents, draft.depths, draft.valid.long()]
    return torch.cat([torch.stack(parts, dim=1), draft.ancestors.long()], dim=1).contiguous()


def unpacked_draft(packed: Tensor, max_depth: int) -> DraftTree:
    """Return the draft that was put into ``packed``."""
    tokens, parents, depths, valid = packed[:, :4].unbind(dim=1)
    return DraftTree(tokens, parents, depths, packed[:, 4:].bool(), valid.bool(), max_depth)


def _likeliest(draft: DraftTree) -> DraftTree:
    """Return the branch that is likeliest to the drafter, as a draft of its own."""
    path, counts = draft.best_branch()
    return chains(draft.tokens.gather(1, path)).up_to(counts)


def _padded(draft: DraftTree, nodes: int) -> dict[str, Tensor]:
    """Return the rows of a draft with nodes that stand for nothing behind, scores left out."""
    more = nodes - draft.nodes
    return {
        "tokens": pad(draft.tokens, (0, more)),
        "parents": pad(draft.parents, (0, more)),
        "depths": pad(draft.depths, (0, more)),
        "ancestors": pad(draft.ancestors, (0, more, 0, more)),
        "valid": pad(draft.valid, (0, more)),
    }
