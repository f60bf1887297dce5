"""Record a model's answers and the candidates at all nodes verified, to compare drafters with.

    python lab/record.py --model FOLDER --data ../shared/data --out build/records/greedy.pt

``lab/replay.py`` decodes these answers again with any drafter. A run that was interrupted is
continued.
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
from script import run
from token_recycling import TokenRecycling
from token_recycling.bench.suites import Question
from token_recycling.decoding.text import Prompt
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.hf.call import CallOptions, prepare_call

CANDIDATES = 16  # kept per node


@dataclass
class Recording:
    """One answer, and the candidates at the tokens of its prompt and at nodes around it.

    A place is the index of the last token that a node shares with the answer, and the tokens that
    follow that one. Tokens are numbered from the first of the answer.
    """

    name: str
    kind: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    prompt_ids: Any = None  # int32 [P, c]
    prompt_logits: Any = None  # float16 [P, c], less the largest
    places: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)  # -> row of ids
    ids: Any = None  # int32 [N, c]
    logits: Any = None  # float16 [N, c], less the largest

    @property
    def category(self) -> str:
        """Return the kind of the question."""
        return self.kind


class Watch(AdaptiveDrafter):
    """The drafter; it gets ``CANDIDATES`` per node, notes them, and learns from the first k."""

    recording: Recording
    seen: list[tuple[int, tuple[int, ...], Any, Any]]
    prompt_notes: list[tuple[Any, Any]]
    prompts = "whole"

    @property
    def k(self) -> int:
        return CANDIDATES

    def begin(self, recording: Recording) -> None:
        """Note what follows in ``recording``."""
        self.recording, self.seen, self.prompt_notes = recording, [], []

    def _first(self, candidates: Candidates) -> Candidates:
        """Return the candidates that a row keeps, with their softmax."""
        ids, p = candidates.ids, candidates.probabilities[..., : self.matrix.k]
        p = p / p.sum(axis=-1, keepdims=True)
        return Candidates(ids[..., : self.matrix.k].copy(), p, candidates.finite)

    def prompt_mask(self, tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.bool)

    def learn_prompt(self, tokens: Tensor, candidates: Candidates, mask: Tensor) -> None:
        self.prompt_notes.append(noted(candidates))
        unseen = self.matrix.unseen(tokens)
        if unseen is not None:
            super().learn_prompt(tokens, self._first(candidates), mask & unseen)

    def observe(
        self, rows: Any, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        ids, logits = noted(candidates)
        root = len(self.recording.answer) - 1
        for node, branch in enumerate(branches(draft)):
            if draft.valid[0, node]:
                self.seen.append((root, branch, ids[node], logits[node]))
        self.recording.answer += accepted.tokens(0)
        super().observe(rows, draft, self._first(candidates), accepted)

    def finish(self) -> None:
        """Put everything into the recording."""
        one = self.recording
        one.prompt_ids, one.prompt_logits = map(np.concatenate, zip(*self.prompt_notes))
        found = {along(one.answer, root, branch): rows for root, branch, *rows in self.seen}
        one.places = {place: row for row, place in enumerate(found)}
        one.ids, one.logits = map(np.stack, zip(*found.values()))


def noted(candidates: Candidates) -> tuple[Any, Any]:
    """Return the candidates of the only row: int32 [n, c], and log p, float16, less the largest."""
    p = np.log(np.maximum(candidates.probabilities[0], 1e-30))
    return candidates.ids[0].astype(np.int32), (p - p[:, :1]).astype(np.float16)


def along(answer: list[int], root: int, branch: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the place of a node below token ``root``; its branch may begin as the answer does."""
    used = 0
    while used < len(branch) and root + 1 < len(answer) and branch[used] == answer[root + 1]:
        used, root = used + 1, root + 1
    return root, branch[used:]


def branches(draft: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens from the root to every node of row 0, the root's left out."""
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        found.append((*found[parents[node]], tokens[node]))
    return found


def write(path: Path, recordings: list[Recording]) -> None:
    """Save recordings."""
    torch.save([vars(one) for one in recordings], path)


def read(path: Path) -> list[Recording]:
    """Load what ``write`` saved."""
    return [Recording(**one) for one in torch.load(path, weights_only=False)]


def answered(
    recycler: TokenRecycling, watch: Watch, question: Question, prompt: Prompt, options: CallOptions
) -> Recording:
    """Return the answer of ``recycler``, whose drafter is ``watch``, with all candidates."""
    call = prepare_call(
        recycler.model, recycler.tokenizer, recycler.target, [prompt], options, {}, stream=False
    )
    (sequence,) = call.sequences
    recording = Recording(question.name, question.category, list(sequence.tokens))
    watch.begin(recording)
    for step in recycler.session.decode(call.sequences, call.accept):
        if not recording.answer:
            recording.answer += step.tokens[0]  # of the prefill
    watch.finish()
    return recording


def main(
    model: Annotated[str, typer.Option(help="Checkpoint.")],
    data: Annotated[Path, typer.Option(help="Folder of the question files.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    per_kind: Annotated[int, typer.Option(help="Questions per kind of Spec-Bench.")] = 6,
    others: Annotated[int, typer.Option(help="Questions of GSM8K and of MBPP.")] = 20,
    tokens: Annotated[int, typer.Option(help="New tokens per answer.")] = 128,
    nodes: Annotated[int, typer.Option(help="Nodes below the root of a draft.")] = 15,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Record answers."""
    torch.set_num_threads(threads)
    first = TokenRecycling.from_pretrained(model, device="cpu")
    watch = Watch(first.matrix, nodes)
    recycler = TokenRecycling(first.model, first.tokenizer, drafter=watch)
    found = read(out) if out.exists() else []
    done = {one.name for one in found}
    asked = questions(data, per_kind, others)
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, question in enumerate(asked):
        if question.name not in done:
            prompt = [{"role": "user", "content": question.turns[0]}]
            options = CallOptions(max_new_tokens=tokens, temperature=temperature, seed=number)
            found.append(answered(recycler, watch, question, prompt, options))
            write(out, found)
            length = len(found[-1].answer)
            print(f"{number + 1} of {len(asked)}: {question.name}, {length} tokens", flush=True)


if __name__ == "__main__":
    run(main)
