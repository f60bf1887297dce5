"""Side-by-side comparison of plain and recycled decoding: tokens and speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from token_recycling.bench.measures import repeats
from token_recycling.decoding.answers import Generation
from token_recycling.decoding.metrics import Stats, Step
from token_recycling.decoding.text import Prompt, encode
from token_recycling.hf.prepare import generate_options
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.limits import check_prompts
from token_recycling.recycler import TokenRecycling
from token_recycling.util.machine import synchronize

ROUNDS = 3


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both plainly and recycled.

    Attributes:
        text: the recycled answer.
        plain_tokens: new tokens of ``model.generate``.
        tokens: new tokens of Token Recycling.
        plain_seconds: per round, time of the whole ``model.generate`` call including prefill.
        seconds: the same for Token Recycling.
        plain_step_seconds: median time of a step of ``model.generate`` after the prompt's.
        step_seconds: the same for Token Recycling.
        stats: of the recycled answer.
        fallback: whether the model cannot verify drafts, so that both are plain decoding.
    """

    text: str
    plain_tokens: list[int]
    tokens: list[int]
    plain_seconds: list[float]
    seconds: list[float]
    plain_step_seconds: float
    step_seconds: float
    stats: Stats
    fallback: bool = False

    @property
    def identical(self) -> bool:
        """True if both gave the same tokens."""
        return self.tokens == self.plain_tokens

    @property
    def plain_tokens_per_second(self) -> float:
        """New tokens of ``model.generate`` over its median time per round."""
        return len(self.plain_tokens) / median(self.plain_seconds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of Token Recycling over its median time per round."""
        return len(self.tokens) / median(self.seconds)

    @property
    def speedup(self) -> float:
        """Tokens per second of Token Recycling over those of ``model.generate``."""
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def c(self) -> float:
        """Median time of a step in steps of ``model.generate``; 1 if a side has none."""
        plain = self.plain_step_seconds
        return self.step_seconds / plain if plain and self.step_seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {
            **vars(self),
            "stats": self.stats.to_dict(),
            "identical": self.identical,
            "speedup": self.speedup,
            "c": self.c,
        }

    def table(self) -> str:
        """Return the comparison as a few lines of text."""
        stats, ratio = self.stats, self.c
        rounds = [plain / own for plain, own in zip(self.plain_seconds, self.seconds)]
        if self.fallback:
            steps = "both decode plainly, by the model's own steps: a difference is noise"
        else:
            drafted = f"{stats.accepted} of {stats.drafted} drafted tokens were right"
            steps = (
                f"a step takes {ratio:.2f} times as long as one of model.generate and brings "
                f"{stats.mat:.2f} tokens ({drafted if stats.drafted else 'nothing was drafted'})"
            )
            if ratio < 1:
                steps += "; it is shorter by faster kernels (docs/cpu.md, docs/graph.md)"
        return (
            f"model.generate   {self.plain_tokens_per_second:7.1f} tokens/s\n"
            f"Token Recycling  {self.tokens_per_second:7.1f} tokens/s   MAT {stats.mat:.2f}\n"
            f"speedup {self.speedup:.2f}x, output "
            + ("identical" if self.identical else "DIFFERENT")
            + f" ({len(self.tokens)} tokens; {len(rounds)} interleaved rounds, "
            + f"{min(rounds):.2f}x to {max(rounds):.2f}x)\n{steps}"
            + ("\nthe answer mostly repeats itself: others gain less" * repeats(self.tokens))
        )


class StepClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each step of a decoder ends, and how many tokens it emits.

    It is a streamer of ``model.generate``, and ``note`` an ``on_step`` of our own.

    Attributes:
        first: time at which the first tokens came.
        lengths: tokens emitted by each step after the prompt's.
        sizes: tokens verified by each of these steps; empty for ``model.generate``.
        seconds: time of each of these steps, and of whatever came between it and the one before.
    """

    def __init__(self) -> None:
        self.first, self._last = 0.0, 0.0
        self.lengths: list[int] = []
        self.sizes: list[int] = []
        self.seconds: list[float] = []
        self._prompt_came = False

    def _end(self, tokens: int) -> None:
        now = perf_counter()
        if not self.first:
            self.first = now
        else:
            self.lengths.append(tokens)
            self.seconds.append(now - self._last)
        self._last = now

    def put(self, value: Tensor) -> None:
        """Take the tokens of a step; ``generate`` passes the prompt first."""
        if self._prompt_came:
            self._end(value.numel())
        self._prompt_came = True

    def end(self) -> None:
        """Do nothing at the end of an answer."""

    def note(self, step: Step) -> None:
        """Take a step of one row."""
        if self.first:
            self.sizes.append(step.size)
        self._end(len(step.tokens[0]))


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Run ``call``; return its result and the seconds until ``device`` finished."""
    begin = perf_counter()
    result = call()
    synchronize(device)
    return result, perf_counter() - begin


def stock_generate(recycler: TokenRecycling, prompt: list[int], options: dict[str, Any]) -> Any:
    """Call ``generate`` of the model's class, bypassing an override on the model object.

    Stops at the model's maximum context, as the recycler does; plain ``generate`` would continue
    past it.

    Raises:
        TokenRecyclingError: the prompt is empty, or leaves no room in the context.
    """
    check_prompts([prompt], recycler.target.max_context)
    ids = torch.tensor([prompt], device=recycler.target.device)
    limit = recycler.target.max_context
    if limit is not None:
        options = {**options, "max_new_tokens": min(options["max_new_tokens"], limit - len(prompt))}
    with recycler.target.lm_head:
        generate = type(recycler.model).generate
        return generate(recycler.model, ids, attention_mask=torch.ones_like(ids), **options)


def plain_generate(recycler: TokenRecycling, prompt: Prompt, options: dict[str, Any]) -> list[int]:
    """Return the new tokens of ``model.generate`` for the recycler's prompt and options."""
    options = dict(options)
    seed, stop = options.pop("seed", None), options.pop("stop", None)
    ids = encode(recycler.tokenizer, prompt)
    given = generate_options(**options)
    if stop:
        given.update(stop_strings=stop, tokenizer=recycler.tokenizer)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        out = stock_generate(recycler, ids, given)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def compare(
    recycler: TokenRecycling,
    prompt: Prompt,
    options: dict[str, Any],
    rounds: int = ROUNDS,
    *,
    warm_up: bool = True,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Comparison:
    """Decode ``prompt`` plainly and recycled in turn, ``rounds`` times.

    With ``warm_up``, one more round comes first, whose times are dropped. Every recycled round
    starts from the matrix as it was before the call; afterwards the matrix holds the additions of
    one round. Without a seed, both sides sample with seed 0. ``on_progress`` is called with the
    number of answers so far and that of all.
    """
    options = {**options, "seed": options.get("seed") or 0}
    before = recycler.matrix.clone()

    def plain(clock: StepClock) -> list[int]:
        return plain_generate(recycler, prompt, {**options, "streamer": clock})

    def recycled(clock: StepClock) -> Generation:
        return recycler.generate(prompt, on_step=clock.note, **options)

    times: list[list[float]] = [[], []]
    steps: list[list[float]] = [[], []]
    answers: list[Any] = [None, None]
    total = 2 * (rounds + warm_up)
    for number in range(total):
        on_progress(number, total)
        clock, side = StepClock(), number % 2
        if side:
            recycler.matrix.copy_(before)
        decode = partial((plain, recycled)[side], clock)
        answers[side], seconds = timed(decode, recycler.target.device)
        if number > 1 or not warm_up:
            times[side].append(seconds)
            steps[side] += clock.seconds
    on_progress(total, total)
    plain_tokens, answer = answers
    plain_step, step = (median(spent) if spent else 0.0 for spent in steps)
    return Comparison(
        answer.text,
        plain_tokens,
        answer.token_ids,
        times[0],
        times[1],
        plain_step,
        step,
        answer.stats,
        fallback=isinstance(recycler.target, PlainTarget),
    )
