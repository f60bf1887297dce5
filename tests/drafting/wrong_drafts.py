"""Drafters that are wrong in some 50 ways: one line a kind, for ``test_wrong_drafts``.

Run in a process of its own, since a wrong draft that gets through may end it or never end.
"""

import faulthandler
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1])]
torch.set_num_threads(1)

from architectures import VOCABULARY, make  # noqa: E402
from letters import letters  # noqa: E402
from models import plain, random_prompts  # noqa: E402
from serving import running  # noqa: E402
from token_recycling import TokenRecycling  # noqa: E402
from token_recycling.drafting.adaptive import AdaptiveDrafter  # noqa: E402
from token_recycling.drafting.base import Drafter, DrafterState  # noqa: E402
from token_recycling.drafting.draft import DraftTree, chains  # noqa: E402
from token_recycling.drafting.matrix import AdjacencyMatrix  # noqa: E402
from token_recycling.errors import TokenRecyclingError  # noqa: E402

SECONDS = 40  # a kind
NODES = 5


def good(roots, n=NODES):
    """A root, two children, and a child of each."""
    batch = len(roots)
    tokens = torch.cat([roots[:, None], (roots[:, None] + torch.arange(1, n)) % VOCABULARY], dim=1)
    parents = torch.tensor([0, 0, 0, 1, 2][:n]).expand(batch, n).clone()
    depths = torch.tensor([0, 1, 1, 2, 2][:n]).expand(batch, n).clone()
    ancestors = torch.zeros(batch, n, n, dtype=torch.bool)
    for node in range(n):
        at = node
        ancestors[:, node, node] = True
        while at:
            at = int(parents[0, at])
            ancestors[:, node, at] = True
    return DraftTree(tokens, parents, depths, ancestors, torch.ones_like(tokens).bool(), 2)


def part(name, change):
    """A kind: one part of a good draft is changed."""
    return lambda roots, size: replace(good(roots), **{name: change(getattr(good(roots), name))})


def put(at, value):
    def change(tensor):
        tensor[..., at] = value
        return tensor

    return change


class Odd:
    """Not a tensor."""

    shape, dtype = (1, 5), torch.long


RIGHT = ("good", "max_depth too small", "max_depth too large", "more nodes than asked for",
         "not contiguous", "scores that ascend", "one node", "text of its own")  # fmt: skip
KINDS = {
    "good": lambda roots, size: good(roots),
    "max_depth too small": lambda roots, size: replace(good(roots), max_depth=0),
    "max_depth too large": lambda roots, size: replace(good(roots), max_depth=99),
    "more nodes than asked for": lambda roots, size: chains(roots[:, None].repeat(1, 60)),
    "not contiguous": lambda roots, size: chains(roots[:, None].repeat(1, 5)),
    "scores that ascend": lambda roots, size: replace(
        good(roots), scores=torch.arange(5.0).expand(len(roots), 5)
    ),
    "one node": lambda roots, size: good(roots, 1),
    "text of its own": lambda roots, size: replace(good(roots.clone()), max_depth=2),
    "a row more": lambda roots, size: good(torch.cat([roots, roots[:1]])),
    "a row less": lambda roots, size: good(roots[:-1]),
    "no rows": lambda roots, size: good(roots[:0]),
    "one row for all, expanded": lambda roots, size: good(roots[:1].repeat(7)),
    "no nodes": lambda roots, size: good(roots).first(0),
    "root not valid": part("valid", put(0, False)),
    "nothing valid": part("valid", torch.zeros_like),
    "valid below invalid": part("valid", put(1, False)),
    "ancestors all True": part("ancestors", torch.ones_like),
    "ancestors all False": part("ancestors", torch.zeros_like),
    "ancestors turned": part("ancestors", lambda x: x.transpose(1, 2)),
    "ancestors without the root": part("ancestors", put(0, False)),
    "ancestors of a chain": part("ancestors", lambda x: torch.ones_like(x).tril()),
    "ancestors of one row": part("ancestors", lambda x: x[:1, :, :3]),
    "ancestors of integers": part("ancestors", lambda x: x.long()),
    "ancestors without itself": part("ancestors", lambda x: x & ~torch.eye(5).bool()),
    "parents all themselves": part("parents", lambda x: torch.arange(5).expand_as(x)),
    "parents negative": part("parents", put(2, -1)),
    "parents behind": part("parents", put(2, 4)),
    "parents large": part("parents", put(2, 2**40)),
    "parents of floats": part("parents", lambda x: x.float()),
    "the root's parent": part("parents", put(0, 1)),
    "depths of another tree": part("depths", lambda x: torch.arange(5).expand_as(x)),
    "depths negative": part("depths", put(0, -1)),
    "depths of int32": part("depths", lambda x: x.int()),
    "depths one-dimensional": part("depths", lambda x: x[0]),
    "tokens one-dimensional": part("tokens", lambda x: x[0]),
    "tokens three-dimensional": part("tokens", lambda x: x[None]),
    "tokens of NumPy": part("tokens", lambda x: x.numpy()),
    "tokens in a list": part("tokens", lambda x: x.tolist()),
    "tokens None": part("tokens", lambda x: None),
    "tokens like a tensor": part("tokens", lambda x: Odd()),
    "tokens of int32": part("tokens", lambda x: x.int()),
    "tokens on meta": part("tokens", lambda x: x.to("meta")),
    "tokens sparse": part("tokens", lambda x: x.to_sparse()),
    "tokens negative": part("tokens", put(3, -1)),
    "tokens beyond the vocabulary": part("tokens", put(3, VOCABULARY)),
    "another root": part("tokens", put(0, 1)),
    "valid of integers": part("valid", lambda x: x.long()),
    "valid of another shape": part("valid", lambda x: x[:, :3]),
    "valid None": part("valid", lambda x: None),
    "scores of NaN": lambda roots, size: replace(
        good(roots), scores=torch.full((len(roots), 5), float("nan"))
    ),
    "scores of another shape": lambda roots, size: replace(good(roots), scores=torch.ones(5)),
    "scores in a list": lambda roots, size: replace(good(roots), scores=[1.0] * 5),
    "nothing": lambda roots, size: None,
    "a tuple": lambda roots, size: (roots, roots),
    "an array": lambda roots, size: np.zeros(5),
    "it raises": lambda roots, size: [][0],
    "the roots are written to": lambda roots, size: good(roots.fill_(7)),
}


class Wrong(Drafter):
    """Proposes what a kind says."""

    name = "wrong"

    def __init__(self, kind):
        self.kind = kind

    def propose(self, state, roots, size=None):
        return KINDS[self.kind](roots, size)


class Without(Wrong):
    """Takes no ``size``."""

    def propose(self, state, roots):
        return good(roots)


class Fails(Wrong):
    """One of its other methods raises."""

    def propose(self, state, roots, size=None):
        if self.kind == "name":
            raise RuntimeError("never called")
        return good(roots)

    def new_state(self, batch, capacity=None):
        return {"new_state": [][0] if self.kind == "new_state" else DrafterState()}.get("new_state")

    def load(self, state, texts):
        if self.kind == "load":
            raise KeyError(3)

    def prompt_mask(self, tokens):
        return torch.ones(1, 2) if self.kind == "prompt_mask" else None

    def observe(self, state, draft, candidates, accepted):
        if self.kind == "observe":
            raise ValueError("two\nlines")


class Child(AdaptiveDrafter):
    """Derived from one of ours, which are not checked."""

    def propose(self, state, roots, size=None):
        draft = super().propose(state, roots, size)
        return replace(draft, ancestors=torch.ones_like(draft.ancestors))


DRAFTERS = {kind: lambda kind=kind: Wrong(kind) for kind in KINDS}
DRAFTERS |= {f"{what} raises": lambda what=what: Fails(what)
             for what in ("new_state", "load", "prompt_mask", "observe")}  # fmt: skip
DRAFTERS["no size"] = lambda: Without("good")
DRAFTERS["derived from ours"] = lambda: Child(AdjacencyMatrix(VOCABULARY, 8), 6)


def tried(call, right):
    """ "right", "error: …" or what is wrong."""
    try:
        found = call()
    except TokenRecyclingError as error:
        text = str(error)
        named = "wrong" in text.split() or "adaptive" in text
        return f"error: {text}" if named and "\n" not in text else f"UNCLEAR {text!r}"
    except Exception as error:
        return f"RAISED {type(error).__name__}: {error}"
    return "right" if found == right else "OTHER TEXT"


def main(only):
    model, given = make("llama"), random_prompts([9, 14, 5])
    expected, tokenizer = [plain(model, prompt, 12) for prompt in given], letters()
    for kind, drafter in DRAFTERS.items():
        if only and kind not in only:
            continue
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        results = {}
        for graph in (False, True):
            try:
                recycler = TokenRecycling(model, drafter=drafter(), graph=graph)
            except TokenRecyclingError as error:
                results["made"] = f"error: {error}"
                continue
            name = "graph" if graph else "loop"
            results[name] = tried(
                lambda: recycler.generate(given[0], max_new_tokens=12).token_ids,  # noqa: B023
                expected[0],
            )
            results[f"{name} of three"] = tried(
                lambda: [a.token_ids for a in recycler.generate(given, max_new_tokens=12)],  # noqa: B023
                expected,
            )
        recycler = TokenRecycling(model, tokenizer, drafter=drafter())
        text = tokenizer.decode(expected[1], skip_special_tokens=True)
        with running(recycler) as server:
            results["server"] = tried(lambda: ask(server, given[1]), text)
        print(json.dumps([kind, results]), flush=True)
    faulthandler.cancel_dump_traceback_later()


def ask(server, prompt):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    reply = server.post("/v1/completions", **body).json()
    if "error" in reply:
        raise TokenRecyclingError(reply["error"]["message"])
    return reply["choices"][0]["text"]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
