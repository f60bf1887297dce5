"""Templates: the shapes of static draft trees, and their files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling import defaults
from token_recycling.drafting.draft import DraftTree
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import is_file

Paths = tuple[tuple[int, ...], ...]
FOLDER = Path(__file__).parent / "trees"
MAX_DEPTH = 200
CHAIN = re.compile(r"chain-(\d{1,9})")


@dataclass(frozen=True)
class TreeTemplate:
    """The shape of a static draft tree.

    A path identifies a node by the candidate ranks from the root down to it: ``(0, 2)`` is the
    third candidate of the root's first candidate. Node 0 is the root and has no path; the other
    nodes are in the order of ``paths``, each after its parent.

    Attributes:
        name: the tree's name.
        paths: level by level; in a ranked tree the most useful first, so that the first N of them
            are the best tree of N paths.
        acceptance: the acceptance probability of each path of a ranked tree; else empty.
        description: one line.
        provenance: where the paths come from.
    """

    name: str
    paths: Paths
    acceptance: tuple[float, ...] = ()
    description: str = ""
    provenance: str = ""

    @classmethod
    def from_paths(
        cls, name: str, paths: Any, acceptance: Any = None, **about: str
    ) -> TreeTemplate:
        """Check ``paths`` (lists of ranks); sort them by level, or by falling ``acceptance``.

        Raises:
            TokenRecyclingError: there is no path; or one is not a list of ranks, is too long, is
                a duplicate or has no parent (the message names the path); or ``acceptance`` does
                not have one number for each path, at most that of its parent.
        """
        if not isinstance(paths, list | tuple) or not paths:
            raise TokenRecyclingError(f"tree {name}: it has no paths; give at least [[0]]")
        seen: set[tuple[int, ...]] = set()
        for path in paths:
            are_ranks = isinstance(path, list | tuple) and all(
                isinstance(rank, int) and not isinstance(rank, bool) for rank in path
            )
            if not are_ranks or not path or min(path) < 0:
                raise TokenRecyclingError(
                    f"tree {name}: {json.dumps(path, default=str)} is not a path; "
                    "a path is a list of one or more ranks, 0 or higher"
                )
            if tuple(path) in seen:
                raise TokenRecyclingError(f"tree {name}: path {list(path)} appears twice")
            seen.add(tuple(path))
            if len(path) > MAX_DEPTH:
                raise TokenRecyclingError(
                    f"tree {name}: a path has {len(path)} ranks; at most {MAX_DEPTH} are allowed"
                )
        for path in sorted(seen, key=lambda p: (len(p), p)):
            if len(path) > 1 and path[:-1] not in seen:
                raise TokenRecyclingError(
                    f"tree {name}: path {list(path)} has no parent {list(path[:-1])}"
                )
        if acceptance is None:
            return cls(name, tuple(sorted(seen, key=lambda p: (len(p), p))), (), **about)
        if (
            not isinstance(acceptance, list | tuple)
            or len(acceptance) != len(paths)
            or not all(
                isinstance(probability, int | float) and 0 <= probability <= 1
                for probability in acceptance
            )
        ):
            raise TokenRecyclingError(
                f"tree {name}: acceptance must have one number from 0 to 1 per path"
            )
        probability = {tuple(path): float(value) for path, value in zip(paths, acceptance)}
        for path in probability:
            if probability[path] > probability.get(path[:-1], 1.0):
                raise TokenRecyclingError(
                    f"tree {name}: path {list(path)} has a higher acceptance than its parent"
                )
        order = sorted(probability, key=lambda p: (-probability[p], len(p), p))
        return cls(name, tuple(order), tuple(probability[path] for path in order), **about)

    @classmethod
    def chain(cls, length: int) -> TreeTemplate:
        """Return the tree of a single branch of ``length`` best candidates.

        Raises:
            TokenRecyclingError: ``length`` is not within 1..``MAX_DEPTH``.
        """
        if not 1 <= length <= MAX_DEPTH:
            raise TokenRecyclingError(f"no tree chain-{length}: N of chain-N is 1 to {MAX_DEPTH}")
        return cls.from_paths(
            f"chain-{length}",
            [(0,) * depth for depth in range(1, length + 1)],
            description="one branch, always the best candidate",
        )

    @classmethod
    def load(cls, name: str | Path, k: int = defaults.CANDIDATES) -> TreeTemplate:
        """Return a shipped tree, ``chain-N``, or the tree of a JSON file.

        The file contains a list of paths, or an object with ``paths`` and optionally
        ``acceptance``, ``name``, ``description`` and ``provenance``.

        Args:
            name: the tree's name or file.
            k: candidates per token. The ranked tree has the paths whose ranks are below ``k``.

        Raises:
            TokenRecyclingError: there is no such tree or file, the file is not JSON or not a valid
                tree, or the tree needs more candidates.
        """
        if k < 1:
            raise TokenRecyclingError(f"k is {k}; it must be 1 or more")
        if chain := CHAIN.fullmatch(str(name)):
            tree = cls.chain(int(chain[1]))
        else:
            path = FOLDER / f"{name}.json" if str(name) in shipped() else Path(name)
            if not is_file(path):
                known = ", ".join([*shipped(), "chain-N"])
                raise TokenRecyclingError(
                    f"unknown tree {name}: not a file, and not one of {known}"
                )
            tree = cls._read(path)
            if str(name) == "ranked":
                tree = tree.limited(k)
        tree.check_k(k)
        return tree

    @classmethod
    def _read(cls, path: Path) -> TreeTemplate:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise TokenRecyclingError(f"cannot read tree {path} as JSON ({error})") from error
        if not isinstance(data, dict):
            data = {"paths": data}
        about = {key: str(data.get(key, "")) for key in ("description", "provenance")}
        name = str(data.get("name") or path.stem)
        return cls.from_paths(name, data.get("paths"), data.get("acceptance"), **about)

    @property
    def size(self) -> int:
        """Number of nodes, including the root."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Number of edges from the root to the deepest node."""
        return max(map(len, self.paths))

    @property
    def max_rank(self) -> int:
        """Highest rank in any path; the matrix must keep more candidates than this."""
        return max(rank for path in self.paths for rank in path)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent; the root is its own parent."""
        index = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        return (0, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of depth 1, 2, …"""
        levels: list[list[int]] = [[] for _ in range(self.max_depth)]
        for node, path in enumerate(self.paths, start=1):
            levels[len(path) - 1].append(node)
        return tuple(map(tuple, levels))

    def check_k(self, k: int) -> None:
        """Check that ``k`` candidates per token are enough.

        Raises:
            TokenRecyclingError: a path uses rank ``k`` or higher; the message names it.
        """
        for path in self.paths:
            if max(path) >= k:
                raise TokenRecyclingError(
                    f"tree {self.name}: path {list(path)} uses rank {max(path)}, "
                    f"but the matrix keeps k={k} candidates (ranks 0 to {k - 1}); it needs "
                    f"k={self.max_rank + 1}"
                )

    def limited(self, k: int) -> TreeTemplate:
        """Return the tree without the paths that use rank ``k`` or higher."""
        if self.max_rank < k:
            return self
        indices = [i for i, path in enumerate(self.paths) if max(path) < k]
        return replace(
            self,
            paths=tuple(self.paths[i] for i in indices),
            acceptance=tuple(self.acceptance[i] for i in indices if self.acceptance),
        )

    def first(self, count: int) -> TreeTemplate:
        """Return the tree of the first ``count`` paths, named ``name-count``.

        Raises:
            TokenRecyclingError: the tree has fewer paths.
        """
        if count > len(self.paths):
            raise TokenRecyclingError(
                f"tree {self.name}-{count}: only {len(self.paths)} paths are available"
            )
        return replace(
            self,
            name=f"{self.name}-{count}",
            paths=self.paths[:count],
            acceptance=self.acceptance[:count],
        )

    def draw(self) -> str:
        """Draw the tree as text, one node per line, labelled with its rank."""
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
    """Return the names of the shipped trees, smallest first."""
    counts = {
        file.stem: len(json.loads(file.read_text(encoding="utf-8"))["paths"])
        for file in FOLDER.glob("*.json")
    }
    return sorted(counts, key=lambda name: (counts[name], name))


class TreeShape:
    """The structure of a template as tensors on one device, shared by all drafts of that shape."""

    def __init__(self, template: TreeTemplate, device: torch.device | str) -> None:
        n = template.size
        paths: Paths = ((), *template.paths)
        self.size, self.max_depth = n, template.max_depth
        self.parents = torch.tensor(template.parents, device=device)
        ranks = [path[-1] if path else 0 for path in paths]
        self.ranks = torch.tensor(ranks, device=device)  # of each node among its parent's children
        self.depths = torch.tensor([len(path) for path in paths], device=device)
        ancestors = torch.eye(n, dtype=torch.bool, device="cpu")
        for node in range(1, n):
            ancestors[node] |= ancestors[template.parents[node]]
        self.ancestors = ancestors.to(device)

    def draft(self, tokens: Tensor, valid: Tensor) -> DraftTree:
        """Return a draft of this shape with ``tokens`` int64 [B, n] and ``valid`` bool [B, n]."""
        batch, n = tokens.shape
        return DraftTree(
            tokens,
            self.parents.expand(batch, n),
            self.depths.expand(batch, n),
            self.ancestors.expand(batch, n, n),
            valid,
            self.max_depth,
        )
