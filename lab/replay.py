"""Decode recorded answers again with several drafters at once (see ``lab/record.py``).

What a node's candidates are does not depend on the drafter, so they are computed once per node and
kept with the recording. ``Answers.exact`` runs the model for nodes that no drafter has drafted so
far, which takes about as long as decoding; without it these nodes teach nothing, and a replay takes
seconds. So: one exact replay with large drafts, then as many others as needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import CANDIDATES, Recording, along, branches, read, write
from token_recycling import TokenRecycling, defaults
from token_recycling.decoding.walks import path_along
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.candidates import Candidates, top_k
from token_recycling.drafting.draft import DraftTree
from token_recycling.model.target import TreeTarget

# A node, by the last token that it shares with the answer, and the tokens that follow that one.
Place = tuple[int, tuple[int, ...]]


@dataclass
class Result:
    """What a drafter did with one answer."""

    name: str
    kind: str
    lengths: list[int] = field(default_factory=list)  # tokens emitted by each step
    on_path: list[Any] = field(default_factory=list)  # of each draft: nodes that text has taken

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Answers:
    """Recorded answers with the candidates at all nodes drafted so far, and a model for others."""

    def __init__(self, path: Path, recycler: TokenRecycling) -> None:
        self.path, self.exact = path, False
        self.recordings = read(path)
        assert isinstance(recycler.target, TreeTarget)
        self.target = recycler.target
        self.vocab_size = recycler.target.vocab_size
        self.computed = 0  # nodes for which the model was run
        self._at: Recording | None = None  # the answer in the cache
        self._committed = 0  # of its tokens

    def save(self) -> None:
        """Write the recordings with the nodes that were added."""
        write(self.path, self.recordings)

    def candidates(self, one: Recording, places: list[Place]) -> tuple[Any, Any, Any]:
        """Return the candidates at nodes, their logits, and which nodes have some.

        int64 [n, c], float32 [n, c] and bool [n].
        """
        missing = [place for place in places if place not in one.places]
        if missing and self.exact:
            self._compute(one, missing)
        at = np.array([one.places.get(place, -1) for place in places])
        return one.ids[at].astype(np.int64), one.logits[at].astype(np.float32), at >= 0

    def _compute(self, one: Recording, missing: list[Place]) -> None:
        """Run the model over the answer as far as needed, with the missing nodes as a tree."""
        first = min(place[0] for place in missing)
        last = max(place[0] for place in missing)
        if self._at is not one or self._committed > first:
            self.target.prefill([one.prompt])
            self._at, self._committed = one, 0
        tokens, parents, nodes = [], [], {}
        for index in range(self._committed, last + 1):  # the answer itself
            nodes[index, ()] = len(tokens)
            parents.append(max(0, len(tokens) - 1))
            tokens.append(one.answer[index])
        chain = len(tokens)
        for root, branch in sorted(missing, key=lambda place: len(place[1])):
            for end in range(1, len(branch) + 1):
                if (place := (root, branch[:end])) not in nodes:
                    parents.append(nodes[root, branch[: end - 1]])
                    nodes[place] = len(tokens)
                    tokens.append(branch[end - 1])
        draft = tree(tokens, parents)
        values, ids = top_k(self.target.verify(draft)[0], CANDIDATES)
        path = torch.arange(chain)[None]
        self.target.commit(path, [chain])
        self._committed += chain
        self.computed += len(tokens)
        new = [(place, node) for place, node in nodes.items() if place not in one.places]
        for place, _ in new:
            one.places[place] = len(one.places)
        at = [node for _, node in new]
        logits = (values - values[:, :1]).half().numpy()
        one.ids = np.concatenate([one.ids, ids.numpy().astype(np.int32)[at]])
        one.logits = np.concatenate([one.logits, logits[at]])

    def learn_prompt(self, drafter: AnyDrafter, one: Recording) -> None:
        """Let a drafter learn from the prompt as a prefill does (see ``Drafter.prompts``)."""
        if drafter.prompts == "none":
            return
        for begin in range(0, len(one.prompt), defaults.PREFILL_CHUNK):
            part = slice(begin, begin + defaults.PREFILL_CHUNK)
            tokens = torch.tensor([one.prompt[part]])
            mask = drafter.prompt_mask(tokens)
            if mask is None or not mask.any():
                continue
            chosen = mask[0].nonzero()[:, 0]
            if drafter.prompts == "part":
                most = max(1, int(self.target.prompt_fraction * tokens.shape[1]))
                chosen = chosen[-most:]
            ids = one.prompt_ids[part][chosen, : drafter.k].astype(np.int64)
            p = softmax(one.prompt_logits[part][chosen].astype(np.float32), drafter.k)
            found = Candidates(ids[None], p[None], np.ones((1, len(chosen)), np.bool_))
            drafter.learn_prompt(tokens[:, chosen], found, mask[:, chosen])

    def replay(self, drafter: AnyDrafter, one: Recording, n: int | None) -> Result:
        """Decode one answer with drafts of ``n`` nodes below the root; None: with whole drafts."""
        k, answer = drafter.k, one.answer
        result = Result(one.name, one.kind)
        rows = drafter.new_state(1)
        drafter.load(rows, [one.prompt])
        self.learn_prompt(drafter, one)
        done = 1  # tokens of the answer; the first comes from the prefill
        while done < len(answer):
            root = done - 1
            draft = drafter.propose(rows, torch.tensor([answer[root]]), n and n + 1).compact()
            valid = draft.valid[0].numpy()
            places = [along(answer, root, branch) for branch in branches(draft)]
            on_path = np.array([not branch for _, branch in places]) & valid
            reached = max(place[0] for place, on in zip(places, on_path) if on)
            ids = np.zeros((1, len(places), k), np.int64)
            p = np.zeros((1, len(places), k), np.float32)
            real = np.flatnonzero(valid)
            best, logits, known = self.candidates(one, [places[node] for node in real])
            ids[0, real], p[0, real] = best[:, :k], softmax(logits, k)
            teaches = valid.copy()
            teaches[real] = known
            emitted = answer[done : reached + 2]
            result.on_path.append(on_path)
            found = Candidates(ids, p, teaches[None])
            tokens = torch.tensor([emitted])
            path = path_along(draft, tokens)
            accepted = Accepted(path, tokens, torch.tensor([len(emitted)]))
            drafter.observe(rows, draft, found, accepted)
            result.lengths.append(len(emitted))
            done += len(emitted)
        return result


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    """Return a draft of one row; parents come before their children."""
    n = len(tokens)
    ancestors = np.zeros((1, n, n), np.bool_)
    depths = np.zeros((1, n), np.int64)
    for node in range(n):
        if node:
            ancestors[0, node] = ancestors[0, parents[node]]
            depths[0, node] = depths[0, parents[node]] + 1
        ancestors[0, node, node] = True
    return DraftTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.from_numpy(depths),
        torch.from_numpy(ancestors),
        torch.ones(1, n, dtype=torch.bool),
        int(depths.max()),
    )


def softmax(logits: Any, k: int) -> Any:
    """Return the softmax over the first k logits, float32 [..., k]."""
    p = np.exp(logits[..., :k])
    return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)


def mat(results: Iterable[Result]) -> float:
    """Return tokens per step."""
    results = list(results)
    return sum(one.tokens for one in results) / max(1, sum(len(one.lengths) for one in results))


def by_kind(results: Sequence[Result]) -> dict[str, float]:
    """Return the MAT of every kind."""
    kinds = dict.fromkeys(one.kind for one in results)
    return {kind: mat(one for one in results if one.kind == kind) for kind in kinds}
