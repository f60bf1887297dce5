"""Plain and recycled decoding side by side: the same tokens, and how much sooner?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from token_recycling.hf_generate.prepare import generate_options
from token_recycling.machine import synchronize
from token_recycling.metrics import Stats
from token_recycling.model.limits import check_prompts
from token_recycling.recycler import TokenRecycling
from token_recycling.text import Prompt, encode

ROUNDS = 3


@dataclass(frozen=True)
class Comparison:
    """Two ways to decode one prompt.

    Attributes:
        text: the recycled answer.
        plain_tokens: from ``model.generate``.
        tokens: from Token Recycling.
        plain_seconds: per round, the whole call with its prefill.
        seconds: likewise.
        stats: of the recycled answer.
    """

    text: str
    plain_tokens: list[int]
    tokens: list[int]
    plain_seconds: list[float]
    seconds: list[float]
    stats: Stats

    @property
    def identical(self) -> bool:
        """True when both ways gave the same tokens."""
        return self.tokens == self.plain_tokens

    @property
    def plain_tokens_per_second(self) -> float:
        """New tokens over the median of the rounds' seconds, of ``model.generate``."""
        return len(self.plain_tokens) / median(self.plain_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Likewise, of Token Recycling."""
        return len(self.tokens) / median(self.seconds)

    @property
    def speedup(self) -> float:
        """Ratio of the two."""
        return self.tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {
            **vars(self),
            "stats": self.stats.to_dict(),
            "identical": self.identical,
            "speedup": self.speedup,
        }

    def table(self) -> str:
        """Return the comparison in a few lines."""
        return (
            f"model.generate   {self.plain_tokens_per_second:7.1f} tokens/s\n"
            f"Token Recycling  {self.tokens_per_second:7.1f} tokens/s   MAT {self.stats.mat:.2f}\n"
            f"speedup {self.speedup:.2f}x, output "
            + ("identical" if self.identical else "DIFFERENT")
            + f" ({len(self.tokens)} tokens, median of {len(self.seconds)} interleaved rounds)"
        )


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Call, and return the result with the seconds until ``device`` was done."""
    begin = perf_counter()
    result = call()
    synchronize(device)
    return result, perf_counter() - begin


def stock_generate(recycler: TokenRecycling, prompt: list[int], options: dict[str, Any]) -> Any:
    """Call the ``generate`` of the model's class, whatever the model object's own does.

    Ends at the model's context, as the recycler does; plain ``generate`` would go on beyond it.

    Raises:
        TokenRecyclingError: the prompt is empty, or leaves no room in the context.
    """
    check_prompts([prompt], recycler.target.max_context)
    ids = torch.tensor([prompt], device=recycler.target.device)
    room = recycler.target.max_context
    if room is not None:
        options = {**options, "max_new_tokens": min(options["max_new_tokens"], room - len(prompt))}
    with recycler.target.lm_head:
        generate = type(recycler.model).generate
        return generate(recycler.model, ids, attention_mask=torch.ones_like(ids), **options)


def plain_generate(recycler: TokenRecycling, prompt: Prompt, options: dict[str, Any]) -> list[int]:
    """Return what ``model.generate`` makes of the same prompt and options."""
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
    recycler: TokenRecycling, prompt: Prompt, options: dict[str, Any], rounds: int = ROUNDS
) -> Comparison:
    """Decode ``prompt`` both ways, ``rounds`` times in turn after one warm-up of each.

    Every recycled round starts from the matrix as it was before the call; afterwards the matrix
    holds what one round adds. Without a seed, sampling uses seed 0 on both sides.
    """
    options = {**options, "seed": options.get("seed") or 0}
    before = recycler.matrix.clone()

    def recycled() -> Any:
        return recycler.generate(prompt, **options)

    def plain() -> list[int]:
        return plain_generate(recycler, prompt, options)

    plain_seconds, seconds = [], []
    for round_ in range(rounds + 1):
        plain_tokens, plain_time = timed(plain, recycler.target.device)
        recycler.matrix.copy_(before)
        answer, time = timed(recycled, recycler.target.device)
        if round_:
            plain_seconds.append(plain_time)
            seconds.append(time)
    return Comparison(
        answer.text, plain_tokens, answer.token_ids, plain_seconds, seconds, answer.stats
    )
