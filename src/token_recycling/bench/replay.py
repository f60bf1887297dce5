"""Replay of recorded answers: every drafter drafts the same text, whatever the model prefers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling.accept import Accepted, accept_and_append
from token_recycling.bench.suites import Question
from token_recycling.decode import Decoding
from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.drafters import AnyDrafter
from token_recycling.errors import TokenRecyclingError
from token_recycling.metrics import Step
from token_recycling.model.lm_head import StockHead
from token_recycling.model.target import LearnPrompt, OnProgress, PromptMask, Target
from token_recycling.sequence import Sequence, at_most
from token_recycling.tokens import NO_TOKEN
from token_recycling.tree import DraftTree


class ForcedAcceptor:
    """Acceptor that emits a recorded answer whatever the logits (teacher forcing); one row."""

    def __init__(self, answer: Iterable[int], device: torch.device | str) -> None:
        """Emit ``answer``; drafts are on ``device``."""
        self.answer = list(answer)
        self._device = device

    def __call__(self, draft: DraftTree, logits: Tensor, sequences: list[Sequence]) -> Accepted:
        """Accept the longest path of the draft that matches the answer."""
        done = sequences[0].new_length
        ahead = self.answer[done : done + draft.max_depth + 1]
        ahead += [NO_TOKEN] * (draft.max_depth + 1 - len(ahead))
        # On the matching path, a node at depth d is followed by token d of the remaining answer.
        choices = torch.tensor(ahead, device=self._device)[draft.depths]
        return accept_and_append(draft, choices, sequences)


class NoModel:
    """Target without logits, for drafters that learn from the text alone."""

    def __init__(self, vocab_size: int) -> None:
        """Create a target with ``vocab_size`` tokens."""
        self.vocab_size, self.device = vocab_size, torch.device("cpu")
        self.max_context: int | None = None
        self.lm_head = StockHead()
        self.inference_context: Callable[[], AbstractContextManager[Any]] = torch.inference_mode

    def prefill(
        self,
        prompts: list[list[int]],
        *,
        prompt_mask: PromptMask | None = None,
        learn_prompt: LearnPrompt | None = None,
        on_progress: OnProgress | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Return no logits, [B, 0]."""
        return torch.zeros(len(prompts), 0)

    def verify(self, draft: DraftTree) -> Tensor:
        """Return no logits, [B, n, 0]."""
        return torch.zeros(*draft.tokens.shape, 0)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Do nothing."""

    def clear_drafts(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Figures:
    """Results of a drafter on recorded answers.

    Attributes:
        answers: number of answers.
        tokens: number of tokens in them, without the first token of each.
        steps: number of steps.
        accepted_per_depth: fraction of steps that accepted at least 1, 2, … tokens.
        nodes: mean number of tokens verified per step.
        draft_seconds: mean time per step spent in ``propose`` and ``observe``.
        expected_speedup: over steps of one token, by the cost curve; None without a measured
            curve.
    """

    answers: int
    tokens: int
    steps: int
    accepted_per_depth: list[float]
    nodes: float
    draft_seconds: float
    expected_speedup: float | None

    @property
    def mat(self) -> float:
        """Mean number of tokens emitted per step (MAT)."""
        return self.tokens / self.steps


def replay(
    target: Target, drafter: AnyDrafter, size: DraftSize, prompt: list[int], answer: list[int]
) -> list[Step]:
    """Let ``drafter`` draft a recorded answer; return the steps after prefill.

    Raises:
        TokenRecyclingError: the drafter needs logits but ``target`` is a ``NoModel``, the answer
            is empty, or prompt and answer do not fit into the context.
    """
    if not answer:
        raise TokenRecyclingError("the answer is empty")
    if drafter.needs_logits and isinstance(target, NoModel):
        raise TokenRecyclingError(
            f"drafter {drafter.name} needs a model's logits; run it without --draft-only"
        )
    room = target.max_context
    if room is not None and len(prompt) + len(answer) > room:
        raise TokenRecyclingError(
            f"prompt and answer have {len(prompt) + len(answer)} tokens; the context holds {room}"
        )
    accept = ForcedAcceptor(answer, target.device)
    sequences = [Sequence(prompt, [at_most(len(answer))])]
    return list(Decoding(target, drafter, size, accept, sequences).steps())[1:]


def figures(runs: list[list[Step]], contexts: list[int], curve: CostCurve | None) -> Figures:
    """Summarise the runs of one drafter; ``contexts`` are the lengths of their prompts.

    Raises:
        TokenRecyclingError: there are no steps.
    """
    steps = [step for run in runs for step in run]
    if not steps:
        raise TokenRecyclingError("no answer has two tokens or more; there is nothing to draft")
    lengths = [len(step.tokens[0]) for step in steps]
    speedup = None
    if curve is not None and curve.measured:
        plain = spent = 0.0
        for run, context in zip(runs, contexts):
            for step in run:
                spent += curve.at(step.nodes, context)
                for _ in step.tokens[0]:
                    plain += curve.at(1, context)
                    context += 1
        speedup = plain / spent
    return Figures(
        answers=len(runs),
        tokens=sum(lengths),
        steps=len(steps),
        accepted_per_depth=[
            sum(n > depth for n in lengths) / len(steps) for depth in range(1, max(lengths))
        ],
        nodes=sum(step.nodes for step in steps) / len(steps),
        draft_seconds=sum(step.seconds[0] + step.seconds[3] for step in steps) / len(steps),
        expected_speedup=speedup,
    )


def read_answers(path: Path, questions: Iterable[Question]) -> list[Question]:
    """Return the questions with their answers from a file in Spec-Bench's format.

    Questions without an answer are dropped.

    Raises:
        TokenRecyclingError: the file cannot be read, or answers none of the questions.
    """
    recorded: dict[tuple[str, str], tuple[str, ...]] = {}
    suites: set[str] = set()
    for number, row in _lines(path):
        try:
            suite, turns = str(row.get("suite", "")), row["choices"][0]["turns"]
            if not isinstance(turns, list) or not all(map(_is_text, turns)):
                raise TypeError("turns must be a list of valid strings")
            recorded[suite, str(row["question_id"])] = tuple(turns)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise TokenRecyclingError(
                f"{path}, line {number}: invalid answer ({error!r})"
            ) from error
        suites.add(suite)
    # If the file covers a single suite, match by id alone: the suite's name may have changed.
    only = suites.pop() if len(suites) == 1 else None
    keys = [(q.suite if only is None else only, q.id) for q in questions]
    found = [replace(q, answers=recorded[k]) for q, k in zip(questions, keys) if k in recorded]
    if not found:
        raise TokenRecyclingError(f"{path} contains no answers to these questions")
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenRecyclingError(f"cannot read the answers in {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TokenRecyclingError(
                    f"{path}, line {number}: invalid JSON ({error})"
                ) from error
