"""Record what a model says around its own answers, so that drafters can be compared in seconds.

    python lab/record.py --model FOLDER --data ../shared/data --out build/records/greedy.pt

At every token of an answer, not only at every step, a tree of ``--nodes`` tokens is verified and
one token is emitted; the ``--candidates`` best tokens at each node are kept. ``lab/replay.py``
decodes these answers again with any drafter: what a node's candidates are does not depend on the
tree that it is in. A run that was interrupted is continued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from questions import questions
from token_recycling import TokenRecycling
from token_recycling.accept import Accepted, Acceptor
from token_recycling.call import CallOptions, prepare_call
from token_recycling.ranking import top_k
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree


@dataclass
class Recording:
    """One answer: its tokens, and the candidates of all nodes.

    ``paths`` has one entry per node: the index of the answer's token below which the node's branch
    begins, and the tokens of the branch. Tokens are numbered from the first of the answer.
    """

    name: str
    kind: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    prompt_ids: Any = None  # int32 [P, c]
    prompt_logits: Any = None  # float16 [P, c], less the largest
    paths: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    ids: Any = None  # int32 [N, c]
    logits: Any = None  # float16 [N, c]


class OneToken:
    """Emits only the token after the root; the draft is verified, but never followed."""

    def __init__(self, accept: Acceptor) -> None:
        self.accept = accept

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        return self.accept(draft.first(1), logits[:, :1], sequences)


def watch(recycler: TokenRecycling, recording: Recording, count: int) -> None:
    """Let the recycler's drafter note all candidates in ``recording``."""
    drafter = recycler.drafter
    kind = type(drafter)
    prompts: list[tuple[Any, Any]] = []
    nodes: list[tuple[Any, Any]] = []

    def best(logits: Tensor) -> tuple[Any, Any]:
        values, ids = top_k(logits, count)
        return ids.numpy().astype(np.int32), (values - values[..., :1]).half().numpy()

    def prompt_mask(tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.bool)

    def learn_prompt(tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        ids, values = best(logits[0])
        prompts.append((ids, values))
        recording.prompt_ids, recording.prompt_logits = map(np.concatenate, zip(*prompts))
        unseen = recycler.matrix.unseen(tokens)
        kind.learn_prompt(drafter, tokens, logits, mask & (unseen if unseen is not None else mask))

    def observe(rows: Any, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        ids, values = best(logits[0])
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        root = len(recording.answer) - 1
        branches: list[tuple[int, ...]] = [()]
        kept = []
        for node in range(len(tokens)):
            if node:
                branches.append((*branches[parents[node]], tokens[node]))
            if draft.valid[0, node]:
                kept.append(node)
                recording.paths.append((root, branches[node]))
        nodes.append((ids[kept], values[kept]))
        recording.answer += accepted.tokens[0]
        recording.ids, recording.logits = map(np.concatenate, zip(*nodes))
        kind.observe(drafter, rows, draft, logits, accepted)

    drafter.prompt_mask, drafter.learn_prompt, drafter.observe = prompt_mask, learn_prompt, observe


def main(
    model: Annotated[str, typer.Option(help="Checkpoint.")],
    data: Annotated[Path, typer.Option(help="Folder of the question files.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    per_kind: Annotated[int, typer.Option(help="Questions per kind of Spec-Bench.")] = 6,
    others: Annotated[int, typer.Option(help="Questions of GSM8K and of MBPP.")] = 20,
    tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 128,
    nodes: Annotated[int, typer.Option(help="Nodes below each token of an answer.")] = 24,
    candidates: Annotated[int, typer.Option(help="Candidates kept per node.")] = 16,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Record answers."""
    torch.set_num_threads(threads)
    recycler = TokenRecycling.from_pretrained(
        model, device="cpu", tree=f"ranked-{nodes}", k=candidates, warm=False
    )
    found: list[Recording] = torch.load(out, weights_only=False) if out.exists() else []
    done = {one.name for one in found}
    asked = questions(data, per_kind, others)
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, question in enumerate(asked):
        if question.name in done:
            continue
        prompt = [{"role": "user", "content": question.turns[0]}]
        options = CallOptions(max_new_tokens=tokens, temperature=temperature, seed=number)
        call = prepare_call(
            recycler.model, recycler.tokenizer, recycler.target, [prompt], options, {}, stream=False
        )
        (sequence,) = call.sequences
        recording = Recording(question.name, question.category, list(sequence.tokens))
        watch(recycler, recording, candidates)
        for step in recycler.steps(call.sequences, OneToken(call.accept)):
            if not recording.answer:
                recording.answer += step.tokens[0]  # of the prefill
        found.append(recording)
        torch.save(found, out)
        print(f"{number + 1} of {len(asked)}: {question.name}, {len(recording.answer)} tokens")


if __name__ == "__main__":
    typer.run(main)
