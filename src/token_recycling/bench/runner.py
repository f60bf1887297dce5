"""Benchmark runner: every variant answers every question, in turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from random import Random
from time import time
from typing import Any

from token_recycling.bench.decoders import Decoder, Turn
from token_recycling.bench.journal import Journal
from token_recycling.bench.memory import PeakMemory
from token_recycling.bench.prompts import DEMO
from token_recycling.bench.suites import Question
from token_recycling.bench.variants import Variant
from token_recycling.decoding.text import as_conversation, encode
from token_recycling.errors import TokenRecyclingError
from token_recycling.recycler import TokenRecycling

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


def digest(questions: Sequence[Question]) -> str:
    """Return a hash of the questions: names, kinds, categories and texts."""
    texts = json.dumps([[q.name, q.kind, q.category, *q.turns] for q in questions])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


class Runner:
    """Answers the questions one by one and stores each answer in the journal before the next.

    All variants answer each turn of a question, in an order that changes (see ``order``). Each has
    its own matrix. Repeated rounds of a question start from the same matrix, so that they do the
    same work; afterwards the matrix holds the additions of one round. In a multi-turn question,
    every variant continues from its baseline's answers. The question ends early if the next answer
    might not fit into the context.
    """

    def __init__(
        self,
        first: TokenRecycling,
        variants: Sequence[Variant],
        *,
        max_new_tokens: int,
        rounds: int,
        seed: int,
        raw: bool,
    ) -> None:
        """Create the decoders on the model of ``first``."""
        self.first, self.rounds, self.seed, self.raw = first, rounds, seed, raw
        self.max_new_tokens = max_new_tokens
        self.decoders = {v.name: Decoder(v, first, max_new_tokens) for v in variants}
        self.memory = PeakMemory(first.target.device)

    def run(
        self,
        questions: Sequence[Question],
        journal: Journal,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Answer the questions that are not in the journal yet.

        Raises:
            TokenRecyclingError: the journal holds other questions, a variant cannot decode, or a
                file cannot be read or written.
        """
        done = len(journal.records)
        if [record.get("name") for record in journal.records] != [q.name for q in questions[:done]]:
            raise TokenRecyclingError(f"{journal.folder} contains answers to other questions")
        if done < len(questions):
            self._warm_up()
            for name, state in journal.state().items():
                self.decoders[name].restore(state)
        on_progress(done, len(questions))
        for index, question in enumerate(questions[done:], start=done):
            record = self.answer(question, index)
            journal.add(record, {name: d.state() for name, d in self.decoders.items()})
            on_progress(index + 1, len(questions))

    def _warm_up(self) -> None:
        """Let every variant decode once, then restore its state."""
        context = self.first.target.max_context
        prompt = conversation(self.first, [DEMO[0]], self.raw)[: context and context // 2]
        for decoder in self.decoders.values():
            before = decoder.state()
            limit, decoder.options["max_new_tokens"] = (
                decoder.options["max_new_tokens"],
                WARM_UP_TOKENS,
            )
            decoder.answer(prompt, self.seed)
            decoder.options["max_new_tokens"] = limit
            decoder.restore(before)

    def answer(self, question: Question, index: int) -> dict[str, Any]:
        """Answer a question with all variants and return its journal record."""
        for decoder in self.decoders.values():
            if decoder.variant.start == "cold":
                decoder.recycler.reset()
        before = {name: decoder.state() for name, decoder in self.decoders.items()}
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

    def _fits(self, prompt: list[int]) -> bool:
        limit = self.first.target.max_context
        return limit is None or len(prompt) + self.max_new_tokens <= limit

    def _round(self, question: Question, index: int, round_: int, found: dict[str, Any]) -> None:
        said: dict[str, list[str]] = {}  # the conversation so far, by baseline
        for number, text in enumerate(question.turns):
            seed = self.seed + number
            prompts = {
                base: conversation(self.first, [*said.get(base, []), text], self.raw)
                for base in {d.variant.baseline for d in self.decoders.values()}
            }
            if not all(map(self._fits, prompts.values())):
                break
            answers: dict[str, Turn] = {}
            for name in self.order(index, round_ + number):
                decoder = self.decoders[name]
                self.memory.reset()
                answers[name] = decoder.answer(prompts[decoder.variant.baseline], seed)
                peak = self.memory.read()
                row = found[name]
                peaks = [p for p in (row.get("peak_memory_bytes"), peak) if p]
                row["peak_memory_bytes"] = max(peaks, default=None)
            for name, answer in answers.items():
                base = answers[self.decoders[name].variant.baseline]
                kept = answer.to_dict()
                kept["identical"] = answer.token_ids == base.token_ids
                found[name]["rounds"][-1]["turns"].append(kept)
            for baseline in prompts:
                said[baseline] = [*said.get(baseline, []), text, answers[baseline].text]
