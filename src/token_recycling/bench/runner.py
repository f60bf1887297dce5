"""Benchmark runner: every variant answers every question, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from time import time
from typing import Any
from zlib import crc32

import numpy as np

from token_recycling.bench.decoders import Decoder
from token_recycling.bench.journal import Journal, States
from token_recycling.bench.prompts import DEMO
from token_recycling.bench.suites import Question
from token_recycling.bench.variants import BASELINE, Variant
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.recycler import TokenRecycling
from token_recycling.util import memory

WARM_UP_TOKENS = 16


def conversation(recycler: TokenRecycling, turns: Sequence[str], raw: bool) -> list[int]:
    """Return the prompt's tokens; ``turns`` alternate between user and model."""
    return encode(recycler.tokenizer, as_conversation(recycler.tokenizer, turns, raw))


def fitting(
    recycler: TokenRecycling, questions: Sequence[Question], max_new_tokens: int, raw: bool
) -> tuple[list[Question], list[Question]]:
    """Split questions by whether they fit into the model's context together with their answers.

    A question with a turn that gives no tokens counts as not fitting.

    Returns:
        Questions that fit, and the others.
    """
    limit = recycler.target.max_context
    fits: list[Question] = []
    others: list[Question] = []
    for question in questions:
        lengths = [len(conversation(recycler, [turn], raw)) for turn in question.turns]
        fit = limit is None or sum(lengths) + len(lengths) * max_new_tokens <= limit
        (fits if fit and all(lengths) else others).append(question)
    return fits, others


def seed_of(seed: int, name: str, round_: int, turn: int) -> int:
    """Return the seed of an answer, the same for all variants and independent of all others."""
    entropy = [seed, crc32(name.encode()), round_, turn]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class Runner:
    """Answers the questions one by one.

    All variants answer each turn of a question, in an order that changes (see ``order``). Each has
    its own matrix. Repeated rounds of a question start from the same matrix, so that they do the
    same work unless they sample, each with its own seed; afterwards the matrix holds the additions
    of one round. In a multi-turn question, every variant continues from the baseline's answers. The
    question ends early if the next answer might not fit into the context.
    """

    def __init__(
        self,
        first: TokenRecycling,
        variants: Sequence[Variant],
        *,
        rounds: int,
        seed: int,
        raw: bool,
        **options: Any,
    ) -> None:
        """Create the decoders on the model of ``first``.

        Args:
            first: of the model.
            variants: the baseline among them.
            rounds: answers of every variant to a question.
            seed: that of every answer is drawn from.
            raw: do not use the chat template.
            **options: of every answer: ``max_new_tokens``, and for sampling ``temperature``,
                ``top_p``.
        """
        self.first, self.rounds, self.seed, self.raw = first, rounds, seed, raw
        self.max_new_tokens: int = options["max_new_tokens"]
        self.decoders = {v.name: Decoder(v, first, options) for v in variants}

    def run(
        self,
        questions: Sequence[Question],
        journal: Journal,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Answer the questions that have no record in ``journal`` yet, and add theirs.

        Raises:
            TokenRecyclingError: a variant cannot decode.
        """
        self._warm_up()
        for name, state in journal.states.items():
            self.decoders[name].restore(state)
        for index in range(len(journal.records), len(questions)):
            on_progress(index, len(questions))
            journal.add(self.answer(questions[index], index), self._states())
        on_progress(len(questions), len(questions))

    def _states(self) -> States:
        return {name: decoder.state() for name, decoder in self.decoders.items()}

    def _warm_up(self) -> None:
        """Let every variant decode once, then restore its state."""
        context = self.first.target.max_context
        prompt = conversation(self.first, [DEMO[0]], self.raw)[: context and context // 2]
        for decoder in self.decoders.values():
            before, options = decoder.state(), decoder.options
            decoder.options = {**options, "max_new_tokens": WARM_UP_TOKENS}
            decoder.answer(prompt, 0)
            decoder.options = options
            decoder.restore(before)

    def answer(self, question: Question, index: int) -> dict[str, Any]:
        """Answer a question with all variants and return its record."""
        for decoder in self.decoders.values():
            if decoder.variant.cold:
                decoder.restore(decoder.initial)
        before = self._states() if self.rounds > 1 else {}  # for the rounds after the first
        record: dict[str, Any] = {
            "name": question.name,
            "suite": question.suite,
            "id": question.id,
            "kind": question.kind,
            "category": question.category,
            "prompt": question.turns[0],
            "time": time(),
            "variants": {
                name: {
                    "matrix_rows_before": d.recycler.matrix.rows_seen if d.variant.drafter else 0,
                    "rounds": [],
                }
                for name, d in self.decoders.items()
            },
        }
        for round_ in range(self.rounds):
            for name, decoder in self.decoders.items():
                if round_:
                    decoder.restore(before[name])
                record["variants"][name]["rounds"].append({"turns": []})
            self._round(question, index, round_, record["variants"])
        return record

    def order(self, index: int, moves: int) -> list[str]:
        """Return the order in which the variants decode question ``index``, rotated by ``moves``.

        In a block of as many questions as there are variants, each variant comes first once. The
        order within a block is random, because the kinds of questions also alternate and no kind
        may always get the same order.
        """
        names = list(self.decoders)
        block, place = divmod(index, len(names))
        lots = Random(block).sample(range(len(names)), len(names))
        turn = (lots[place] + moves) % len(names)
        return names[turn:] + names[:turn]

    def _round(self, question: Question, index: int, round_: int, variants: dict[str, Any]) -> None:
        limit, device = self.first.target.max_context, self.first.target.device
        said: list[str] = []  # the conversation so far
        for number, text in enumerate(question.turns):
            seed = seed_of(self.seed, question.name, round_, number)
            prompt = conversation(self.first, [*said, text], self.raw)
            if limit is not None and len(prompt) + self.max_new_tokens > limit:
                break
            answers: dict[str, dict[str, Any]] = {}
            for name in self.order(index, round_ + number):
                memory.reset_peak(device)
                answers[name] = self.decoders[name].answer(prompt, seed)
                peaks = [variants[name].get("peak_memory_bytes"), memory.peak(device)]
                variants[name]["peak_memory_bytes"] = max(filter(None, peaks), default=None)
            expected = answers[BASELINE]
            for name, turn in answers.items():
                identical = turn["token_ids"] == expected["token_ids"]
                variants[name]["rounds"][-1]["turns"].append({**turn, "identical": identical})
            said += [text, expected["text"]]
