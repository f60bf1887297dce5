"""Teaches a matrix with the model's own answers to generic prompts, before its first user."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from itertools import cycle, islice
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
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.size.base import DraftSize
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.base import OnProgress, Target
from token_recycling.model.target import TreeTarget

ROWS = 32  # answers at once
NEW_TOKENS = 128  # of an answer, at most
TEMPERATURES = (0.0, 0.7, 1.0)  # in turn; 0 is greedy


class _RootsOnly(DraftSize):
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
    drafter: AnyDrafter,
    target: Target,
    tokenizer: Any,
    *,
    tokens: int,
    seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> int:
    """Let the model answer prompts, and learn candidates and weights from them.

    Args:
        drafter: learns.
        target: the model; its context stays as it is.
        tokenizer: its tokenizer, or None.
        tokens: of all answers; no batch starts after that many.
        seconds: no step starts after this time; None: no limit.
        on_progress: called after every step with (tokens done, ``tokens``).

    Returns:
        The tokens of all answers.

    Raises:
        TokenRecyclingError: there is no tokenizer, or the drafter is not "adaptive".
    """
    if tokenizer is None:
        raise TokenRecyclingError("without a tokenizer the model cannot be asked anything")
    if not (isinstance(target, TreeTarget) and isinstance(drafter, AdaptiveDrafter)):
        raise TokenRecyclingError(f"teach needs the drafter adaptive, not {drafter.name}")
    begun = perf_counter()
    own_target = copy.copy(target)
    own_target.reset()
    asked, answered, number = prompts(), 0, 0
    while answered < tokens:
        sequences = [_sequence(own_target, tokenizer, prompt) for prompt in islice(asked, ROWS)]
        accept = _acceptor(own_target, number)
        number += ROWS
        decoding = Decoding(own_target, drafter, _RootsOnly(), accept, sequences)
        with closing(decoding.steps()) as steps:
            for step in steps:
                answered += sum(map(len, step.tokens))
                if on_progress is not None:
                    on_progress(min(answered, tokens), tokens)
                if seconds is not None and perf_counter() - begun >= seconds:
                    return answered
    return answered


def _sequence(target: TreeTarget, tokenizer: Any, prompt: str) -> Sequence:
    ids = encode(tokenizer, as_conversation(tokenizer, [prompt]))
    max_tokens = NEW_TOKENS
    if target.max_context is not None:
        ids = ids[-max(1, target.max_context // 2) :]
        max_tokens = min(max_tokens, target.max_context - len(ids))
    rules: list[StopRule] = [at_most(max_tokens)]
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


# The prompts

TOPICS = (
    "a lighthouse", "tea", "the moon", "bicycles", "honey bees", "a winter market", "glass",
    "the human heart", "a lost key", "volcanoes", "chess", "a small bakery", "rivers", "sleep",
    "old maps", "a train journey", "coral reefs", "teaching children to read", "bridges", "salt",
    "a family garden", "solar panels", "the violin", "moving to another city", "libraries", "rain",
    "a job interview", "whales", "cooking for guests", "the history of paper", "running", "money",
    "a museum guide", "vaccines", "mountain villages", "computer programs", "friendship", "clocks",
    "public transport", "the ocean at night", "photography", "apples", "a broken phone", "deserts",
    "learning a language", "trade between countries", "a shy detective", "forests", "football",
    "electric cars",
)  # fmt: skip
REQUESTS = (
    "Write a short story about {topic}.",
    "Explain {topic} to a ten-year-old.",
    "List five facts about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a polite email to a colleague about {topic}.",
    "Write a dialogue between two friends who talk about {topic}.",
    "Why does {topic} matter? Answer step by step.",
    "You are a travel writer. Describe {topic} in two paragraphs.",
    "Compare {topic} with something similar.",
    "Write a poem about {topic}.",
    "Summarize what is known about {topic} in three sentences.",
    "Give advice to somebody who is worried about {topic}.",
    "How would a scientist study {topic}?",
    "Write a product description that mentions {topic}.",
    "What would the world be like without {topic}?",
    "Write an outline for a talk about {topic}.",
)
CODE = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}, and explain how it works.",
    "Write JavaScript code that {task}.",
    "How can a program be written that {task}? Show an example.",
)
TASKS = (
    "reverses the words of a sentence", "finds the largest number in a list",
    "counts the vowels in a string", "checks whether a number is prime",
    "sorts a list of names by length", "merges two dictionaries", "adds up a column of a CSV file",
    "removes duplicates from a list", "computes the average of some numbers",
    "converts Celsius to Fahrenheit", "finds all files in a folder", "validates an email address",
    "prints the first n square numbers", "draws a triangle of stars",
    "searches a sorted list for a value", "groups records by date", "plays rock, paper, scissors",
)  # fmt: skip
SUMS = (
    "A shop sells {a} boxes of {b} pencils each and then {c} single pencils. How many is that?",
    "Maria has {a} coins. She gives {b} to her brother and finds {c} more. How many has she now?",
    "A bus drives {a} km per hour for {b} hours and then {c} km more. How far does it drive?",
    "{a} people share {b} cakes, each cut into {c} pieces. How many pieces does each person get?",
    "A book has {a} pages. Tom reads {b} pages a day for {c} days. How many pages are left?",
    "What is {a} + {b} * {c}? Show the steps.",
)
LANGUAGES = (
    "Translate into German: {sentence}", "Translate into French: {sentence}",
    "Translate into Spanish: {sentence}", "Erkläre in einfachen Worten: {topic}.",
    "Explique en français ce que c'est : {topic}.", "Escribe una historia corta sobre: {topic}.",
)  # fmt: skip
SENTENCES = (
    "The museum opens at nine and closes at five.", "I forgot my umbrella, so I got wet.",
    "Could you tell me where the station is?", "My sister works in a hospital near the river.",
    "The meeting was moved to Thursday because of the storm.", "We would like a table for four.",
    "He has lived in this street since he was born.",
)  # fmt: skip


def prompts() -> Iterator[str]:
    """Yield questions without end; kinds and topics change from one to the next.

    Of 12 in a row, 7 ask for prose, 2 for code, 2 for arithmetic and 1 for another language.
    """
    topics, tasks, sentences = cycle(TOPICS), cycle(TASKS), cycle(SENTENCES)
    requests, code, sums, languages = map(cycle, (REQUESTS, CODE, SUMS, LANGUAGES))
    number = 0
    while True:
        place = number % 12
        if place in (2, 8):
            yield next(code).format(task=next(tasks))
        elif place in (4, 10):
            a, b, c = 20 + 7 * number % 61, 3 + number % 7, 2 + 5 * number % 13
            yield next(sums).format(a=a, b=b, c=c)
        elif place == 6:
            yield next(languages).format(topic=next(topics), sentence=next(sentences))
        else:
            yield next(requests).format(topic=next(topics))
        if number % (12 * len(TOPICS)) == 0:  # another topic for each request the next time
            next(topics)
        number += 1
