"""Draft trees: the static template of a tree's shape, and the tree of tokens of one step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling.errors import TokenRecyclingError

Paths = tuple[tuple[int, ...], ...]
FOLDER = Path(__file__).parent / "trees"
MAX_DEPTH = 200
CHAIN = re.compile(r"chain-([1-9]\d*)")


@dataclass(frozen=True)
class TreeTemplate:
    """The shape of a static draft tree.

    A path names a node by the candidate ranks that lead to it from the root: ``(0, 2)`` is the
    third candidate of the first candidate of the root. Node 0 is the root and has no path; the
    others follow level by level, so every level is one slice of the nodes.
    """

    name: str
    paths: Paths
    description: str = ""
    provenance: str = ""

    @classmethod
    def from_paths(cls, name: str, paths: Any, **about: str) -> TreeTemplate:
        """Check ``paths`` (lists of ranks) and put them in level order.

        Raises:
            TokenRecyclingError: there is no path, or one is no list of ranks, stands twice, or
                has no parent; the message names the path.
        """
        if not isinstance(paths, list | tuple) or not paths:
            raise TokenRecyclingError(f"tree {name}: it has no paths; give at least [[0]]")
        seen: set[tuple[int, ...]] = set()
        for path in paths:
            whole = isinstance(path, list | tuple) and all(
                isinstance(rank, int) and not isinstance(rank, bool) for rank in path
            )
            if not whole or not path or min(path) < 0:
                raise TokenRecyclingError(
                    f"tree {name}: {json.dumps(path, default=str)} is no path; "
                    "a path is a list of one or more ranks from 0"
                )
            if tuple(path) in seen:
                raise TokenRecyclingError(f"tree {name}: path {list(path)} stands twice")
            seen.add(tuple(path))
            if len(path) > MAX_DEPTH:
                raise TokenRecyclingError(
                    f"tree {name}: a path of {len(path)} ranks; {MAX_DEPTH} at most"
                )
        for path in sorted(seen, key=lambda p: (len(p), p)):
            if len(path) > 1 and path[:-1] not in seen:
                raise TokenRecyclingError(
                    f"tree {name}: path {list(path)} has no parent {list(path[:-1])}"
                )
        return cls(name, tuple(sorted(seen, key=lambda p: (len(p), p))), **about)

    @classmethod
    def chain(cls, length: int) -> TreeTemplate:
        """Return the tree of one branch: the best candidate, ``length`` times."""
        return cls.from_paths(
            f"chain-{length}",
            [(0,) * depth for depth in range(1, min(length, MAX_DEPTH + 1) + 1)],
            description="one branch, always the best candidate",
        )

    @classmethod
    def load(cls, name: str | Path) -> TreeTemplate:
        """Return a shipped tree, ``chain-N``, or the tree of a JSON file.

        The file holds a list of paths, or an object with ``paths`` and, if wanted, ``name``,
        ``description`` and ``provenance``.

        Raises:
            TokenRecyclingError: no such tree or file, no JSON, or no tree.
        """
        if chain := CHAIN.fullmatch(str(name)):
            return cls.chain(int(chain[1]))
        path = FOLDER / f"{name}.json" if str(name) in shipped() else Path(name)
        if not path.is_file():
            known = ", ".join([*shipped(), "chain-N"])
            raise TokenRecyclingError(f"no tree {name}: it is no file and none of {known}")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise TokenRecyclingError(f"tree {path}: no JSON ({error})") from error
        if not isinstance(data, dict):
            data = {"paths": data}
        about = {key: str(data.get(key, "")) for key in ("description", "provenance")}
        return cls.from_paths(str(data.get("name") or path.stem), data.get("paths"), **about)

    @property
    def nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Edges from the root to the deepest node."""
        return len(self.paths[-1])

    @property
    def max_rank(self) -> int:
        """Highest rank in any path; the matrix must keep more candidates than this."""
        return max(rank for path in self.paths for rank in path)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent; the root is its own."""
        index = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        return (0, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def levels(self) -> tuple[slice, ...]:
        """The nodes of depth 1, 2, …, each level a slice."""
        depths = [len(path) for path in self.paths]
        starts = [depths.index(d) + 1 for d in range(1, self.max_depth + 1)] + [self.nodes]
        return tuple(map(slice, starts[:-1], starts[1:]))

    def check_k(self, k: int) -> None:
        """Refuse a matrix that keeps too few candidates.

        Raises:
            TokenRecyclingError: a path uses rank ``k`` or higher; the message names it.
        """
        if k < 1:
            raise TokenRecyclingError(f"k is {k}; it must be 1 or more")
        for path in self.paths:
            if max(path) >= k:
                raise TokenRecyclingError(
                    f"tree {self.name}: path {list(path)} uses rank {max(path)}, "
                    f"but the matrix keeps k={k} candidates (ranks 0 to {k - 1})"
                )

    def limited(self, k: int) -> TreeTemplate:
        """Return the tree without the paths that use rank ``k`` or higher."""
        if self.max_rank < k:
            return self
        return replace(self, paths=tuple(path for path in self.paths if max(path) < k))

    def draw(self) -> str:
        """Draw the tree as text, a node a line, each with its rank."""
        children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for path in self.paths:
            children.setdefault(path[:-1], []).append(path)

        def lines(path: tuple[int, ...], prefix: str) -> list[str]:
            result = []
            below = children.get(path, [])
            for child in below:
                last = child == below[-1]
                result.append(f"{prefix}{'└─' if last else '├─'}{child[-1]}")
                result += lines(child, prefix + ("  " if last else "│ "))
            return result

        return "\n".join(["root", *lines((), "")])


def shipped() -> list[str]:
    """Names of the trees that come with the package, smallest first."""
    counts = {
        file.stem: len(json.loads(file.read_text(encoding="utf-8"))["paths"])
        for file in FOLDER.glob("*.json")
    }
    return sorted(counts, key=lambda name: (counts[name], name))


@dataclass(frozen=True)
class DraftTree:
    """The draft of one step for B rows; node 0 of each row is its root.

    Attributes:
        tokens: int64 [B, n].
        parents: int64 [B, n], a parent stands before its children; the root is its own.
        depths: int64 [B, n], 0 for the root.
        ancestors: bool [B, n, n]; ``[b, i, j]``: j is i or above it.
        valid: bool [B, n]; a node that is False stands for no token and is never accepted, and
            neither is anything below it, which must be False too.
        max_depth: bound of ``depths``.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    valid: Tensor
    max_depth: int

    def only(self, rows: Tensor) -> DraftTree:
        """Return the same draft with every node of the rows outside ``rows`` (bool [B]) invalid."""
        return replace(self, valid=self.valid & rows[:, None])

    def compact(self) -> DraftTree:
        """Drop the nodes that are invalid in every row.

        Where every verified node costs time (a CPU), a cold matrix should not pay for a whole
        tree. The shapes of the result depend on the data, so a captured graph skips this.
        """
        kept = self.valid.any(dim=0)
        kept[0] = True
        if bool(kept.all()):
            return self
        nodes = kept.nonzero()[:, 0]
        renumbered = kept.cumsum(0) - 1
        return DraftTree(
            self.tokens[:, nodes],
            # The parent of a node that is invalid in this row may have gone; any node will do.
            renumbered.clamp(min=0)[self.parents[:, nodes]],
            self.depths[:, nodes],
            self.ancestors[:, nodes][:, :, nodes],
            self.valid[:, nodes],
            self.max_depth,
        )


class TreeShape:
    """A template's structure as tensors on one device, shared by all drafts of that shape."""

    def __init__(self, template: TreeTemplate, device: torch.device | str) -> None:
        n = template.nodes
        paths: Paths = ((), *template.paths)
        self.nodes, self.max_depth = n, template.max_depth
        self.parents = torch.tensor(template.parents, device=device)
        ranks = torch.tensor([path[-1] if path else 0 for path in paths], device=device)
        # For every level: where each node's parent stands in the level above, and its rank there.
        starts = [0, *(level.start for level in template.levels)]
        self.rungs = [
            (self.parents[level] - above, ranks[level])
            for above, level in zip(starts, template.levels)
        ]
        self.depths = torch.tensor([len(path) for path in paths], device=device)
        ancestors = torch.eye(n, dtype=torch.bool)
        for node in range(1, n):
            ancestors[node] |= ancestors[template.parents[node]]
        self.ancestors = ancestors.to(device)

    def draft(self, tokens: Tensor, valid: Tensor) -> DraftTree:
        """Return the draft with ``tokens`` int64 [B, n] and ``valid`` bool [B, n]."""
        batch, n = tokens.shape
        return DraftTree(
            tokens,
            self.parents.expand(batch, n),
            self.depths.expand(batch, n),
            self.ancestors.expand(batch, n, n),
            valid,
            self.max_depth,
        )
