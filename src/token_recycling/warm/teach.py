"""Teaches a matrix with the model's own answers to generic prompts (see ``prompts``)."""

from __future__ import annotations

import copy
from contextlib import closing
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

from token_recycling.decoding.accept import Acceptor, FollowAcceptor, GreedyAcceptor
from token_recycling.decoding.loop import Decoding
from token_recycling.decoding.samplers import RowSampler
from token_recycling.decoding.sequence import Sequence, StopRule, at_most, at_token
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.size.base import DraftSize
from token_recycling.model.target import TreeTarget
from token_recycling.util.modes import ordinary_tensors
from token_recycling.warm.fill import OnProgress
from token_recycling.warm.prompts import prompts
from token_recycling.warm.store import WarmRows

ROWS = 32  # answers at once
NEW_TOKENS = 128  # of an answer, at most
TEMPERATURES = (0.0, 0.7, 1.0)  # in turn; 0 is greedy


class RootsOnly(DraftSize):
    """Lets the drafter look for candidates, whose evidence then counts, and verifies none.

    A batch of many rows is limited by arithmetic, so that drafts would only slow it down.
    """

    def limit(self) -> int:
        """Return 2: a root and one node."""
        return 2

    def typical(self, now: int = 0) -> int:
        """Return 1."""
        return 1

    def choose(self, draft: DraftTree) -> int:
        """Return 1."""
        return 1


def teach(
    found: WarmRows,
    target: TreeTarget,
    tokenizer: Any,
    *,
    tokens: int,
    seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Let the model answer prompts, and learn rows, pairs, triples, evidence and weights from them.

    The next call continues with the next prompts. Nothing is done without a tokenizer.

    Args:
        found: what the matrix starts with; modified.
        target: the model; its context stays as it is.
        tokenizer: its tokenizer, or None.
        tokens: of all answers, those of earlier calls included; no batch starts after that many.
        seconds: no step starts after this time; None: no limit.
        on_progress: called after every step with (tokens done, ``tokens``).
    """
    if tokenizer is None:
        return
    begun = perf_counter()
    own = copy.copy(target)
    own.reset()
    with ordinary_tensors():
        drafter = AdaptiveDrafter(found.rows)
    while found.answered < tokens:
        asked = islice(prompts(), found.questions, found.questions + ROWS)
        sequences = [_sequence(own, tokenizer, prompt) for prompt in asked]
        accept = _acceptor(own, found.questions)
        found.questions += ROWS
        decoding = Decoding(own, drafter, RootsOnly(), accept, sequences)
        with closing(decoding.steps()) as steps:
            for step in steps:
                found.answered += sum(map(len, step.tokens))
                if on_progress is not None:
                    on_progress(min(found.answered, tokens), tokens)
                if seconds is not None and perf_counter() - begun >= seconds:
                    return


def _sequence(target: TreeTarget, tokenizer: Any, prompt: str) -> Sequence:
    ids = encode(tokenizer, as_conversation(tokenizer, [prompt]))
    room = NEW_TOKENS
    if target.max_context is not None:
        ids = ids[-max(1, target.max_context // 2) :]
        room = min(room, target.max_context - len(ids))
    rules: list[StopRule] = [at_most(room)]
    eos = getattr(target.model.generation_config, "eos_token_id", None)
    if eos is not None:
        rules.append(at_token([eos] if isinstance(eos, int) else list(eos)))
    return Sequence(ids, rules)


def _acceptor(target: TreeTarget, number: int) -> Acceptor:
    temperature = TEMPERATURES[number // ROWS % len(TEMPERATURES)]
    if not temperature:
        return GreedyAcceptor()
    generators = [torch.Generator(target.device).manual_seed(number + row) for row in range(ROWS)]
    warper = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    return FollowAcceptor([warper] * ROWS, RowSampler(generators))
