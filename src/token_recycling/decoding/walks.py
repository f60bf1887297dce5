"""Walks from the roots of drafts down the tokens that the target chooses.

``host_walk`` takes all choices at once, on the host, and ``path_along`` the tokens of a walk.
``longest_paths`` takes all choices in tensor operations, for graphs (``graph.kernels`` has it as a
kernel for GPUs). ``follow`` draws each token only when the walk has arrived at its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array, compiled
from token_recycling.drafting.draft import DraftTree
from token_recycling.util.tokens import NO_TOKEN

# (parent, token) -> node, of one row
Children = dict[tuple[int, int], int]


@compiled
def host_walk(
    tokens: Any,
    parents: Any,
    depths: Any,
    valid: Any,
    choices: Any,
    path: Any,
    emitted: Any,
    counts: Any,
) -> None:
    """Find the longest path of each row along the choices, as ``longest_paths`` does.

    Args:
        tokens: int64 [B, n].
        parents: int64 [B, n].
        depths: int64 [B, n].
        valid: bool [B, n].
        choices: int64 [B, n].
        path: int64 [B, p], gets the accepted nodes, padded with 0.
        emitted: int64 [B, p], gets the choices after them, padded with ``NO_TOKEN``.
        counts: int64 [2, B], gets how many nodes are valid, and how many choices there are.
    """
    path[:] = 0
    emitted[:] = NO_TOKEN
    counts[:] = 0
    for row in range(len(tokens)):
        for node in range(tokens.shape[1]):
            counts[0, row] += valid[row, node]
        if not valid[row, 0]:
            continue
        best = 0
        for node in range(1, tokens.shape[1]):
            if depths[row, node] <= depths[row, best]:
                continue
            at = node
            while at > 0 and valid[row, at]:
                above = parents[row, at]
                if tokens[row, at] != choices[row, above]:
                    break
                at = above
            if at == 0:
                best = node
        at = best
        counts[1, row] = depths[row, best] + 1
        for depth in range(depths[row, best], -1, -1):
            path[row, depth] = at
            emitted[row, depth] = choices[row, at]
            at = parents[row, at]


def path_along(draft: DraftTree, emitted: Tensor) -> Tensor:
    """Return the nodes after which tokens were emitted, where only these tokens are known.

    Args:
        draft: on the host.
        emitted: int64 [B, p], padded with ``NO_TOKEN``.

    Returns:
        int64 [B, p], the root first, padded with 0. A path ends where no node has the token.
    """
    path = np.empty(emitted.shape, np.int64)
    parts = (draft.tokens, draft.parents, draft.valid, emitted)
    tokens, parents, valid, emitted_ids = map(as_array, parts)
    _walk_along(tokens, parents, valid, emitted_ids, path)
    return torch.from_numpy(path)


@compiled
def _walk_along(tokens: Any, parents: Any, valid: Any, emitted: Any, path: Any) -> None:
    """Write the nodes to ``path`` (see ``path_along``)."""
    path[:] = 0
    for row in range(len(emitted)):
        at = 0
        for step in range(emitted.shape[1] - 1):
            below = 0
            for node in range(at + 1, tokens.shape[1]):
                is_child = valid[row, node] and parents[row, node] == at
                if is_child and tokens[row, node] == emitted[row, step]:
                    below = node
                    break
            if below == 0 or emitted[row, step + 1] == NO_TOKEN:
                break
            at = below
            path[row, step + 1] = at


def longest_paths(draft: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Find the deepest node whose whole path agrees with the target's choices.

    Args:
        draft: B trees of n nodes.
        choices: int64 [B, n], the token that the target chooses after each node.

    Returns:
        The path from the root, int64 [B, max_depth + 1], padded with 0, and its number of nodes,
        int64 [B] (0 where the root is invalid). Among nodes of equal depth the first wins.
    """
    batch, n = draft.tokens.shape
    nodes = torch.arange(n, device=choices.device).expand(batch, n)
    wrong = (draft.tokens != choices.gather(1, draft.parents)) | ~draft.valid
    wrong[:, 0] = ~draft.valid[:, 0]
    cut = (draft.ancestors & wrong[:, None, :]).any(dim=2)
    depth = draft.depths.masked_fill(cut, -1)
    deepest, best = depth.max(dim=1, keepdim=True)
    on_path = draft.ancestors.gather(1, best[:, :, None].expand(batch, 1, n))[:, 0]
    # Nodes on the path go to the column of their depth, all others to an extra last column.
    columns = draft.depths.masked_fill(~on_path, draft.max_depth + 1)
    path = nodes.new_zeros(batch, draft.max_depth + 2).scatter_(1, columns, nodes)
    return path[:, :-1], deepest[:, 0] + 1


def children_of(draft: DraftTree) -> list[Children]:
    """Return the valid nodes of each row by parent and token; of equal siblings the first."""
    by_row: list[Children] = []
    columns = (draft.parents.tolist(), draft.tokens.tolist(), draft.valid.tolist())
    for parents, tokens, valid in zip(*columns):
        nodes = range(len(tokens) - 1, 0, -1)
        by_row.append({(parents[node], tokens[node]): node for node in nodes if valid[node]})
    return by_row


def follow(
    rows: list[int],
    children: list[Children],
    choose: Callable[[list[int], list[int]], list[int]],
) -> tuple[list[list[int]], list[list[int]]]:
    """Choose a token at each row's root, then at its child with this token, and so on.

    Args:
        rows: that take part.
        children: of all B rows.
        choose: gets some of ``rows`` and the node where each of them is; returns a token for each.
            To end a row, it may clear the row's children.

    Returns:
        The nodes of each path, the root first, and the tokens chosen after them; both are empty
        for rows that take no part.
    """
    paths: list[list[int]] = [[] for _ in children]
    emitted: list[list[int]] = [[] for _ in children]
    at = dict.fromkeys(rows, 0)
    while at:
        tokens = choose(list(at), list(at.values()))
        below: dict[int, int] = {}
        for (row, node), token in zip(at.items(), tokens):
            paths[row].append(node)
            emitted[row].append(token)
            child = children[row].get((node, token))
            if child is not None:
                below[row] = child
        at = below
    return paths, emitted
