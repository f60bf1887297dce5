"""Check that a model in its precision gives the text of plain decoding.

Differences are compared with the numerical noise of plain decoding itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from skinny_kernels.errors import one_line
from token_recycling.bench.compare import stock_generate
from token_recycling.decoding.text import Prompt, encode
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.target import TreeTarget
from token_recycling.recycler import TokenRecycling

Verdict = Literal["lossless", "near-tie", "WRONG"]
VERDICTS: tuple[Verdict, ...] = ("lossless", "near-tie", "WRONG")  # the worst is the last
# A differing token is a near-tie if plain decoding preferred its own token by at most this many
# times the noise: once for each of the two logits in each of the two kernels.
NOISES = 4


@dataclass(frozen=True)
class _Difference:
    """The first token where a recycled answer differs from the plain one.

    Attributes:
        position: number of new tokens before it, identical in both answers.
        plain_token: chosen by plain decoding.
        token: chosen instead.
        gap: logit of the plain token minus that of the other one, in plain decoding.
        runner_up: True if the other token was the second choice of plain decoding.
    """

    position: int
    plain_token: int
    token: int
    gap: float
    runner_up: bool


@dataclass(frozen=True)
class Result:
    """The comparison for one prompt.

    Attributes:
        new_tokens: number of new tokens in plain decoding.
        difference: the first one; None if both answers are the same.
        noise: largest difference between the plain answer's logits computed token by token and in
            one forward pass; in half precision, also from those that this package's kernels compute
            token by token. All are plain decoding; only the kernels differ.
        same_steps: True if the answer is that of this package's own steps without drafts.
    """

    new_tokens: int
    difference: _Difference | None
    noise: float
    same_steps: bool = True

    @property
    def verdict(self) -> Verdict:
        """Return near-tie for a difference within the noise of plain decoding, WRONG beyond it."""
        if self.difference is None:
            return "lossless"
        return "near-tie" if self.difference.gap <= NOISES * self.noise else "WRONG"

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {**asdict(self), "verdict": self.verdict}


def overall(results: Iterable[Result]) -> Verdict:
    """Return the worst verdict."""
    return max((result.verdict for result in results), key=VERDICTS.index, default="lossless")


def check(
    recycler: TokenRecycling, prompts: Iterable[Prompt], max_new_tokens: int
) -> Iterator[Result]:
    """Decode every prompt greedily: recycled, by ``generate`` and by our own steps without drafts.

    If the recycler has a float32 LM head, all use it.

    Yields:
        One ``Result`` per prompt.

    Raises:
        TokenRecyclingError: a prompt cannot be used.
    """
    options: Any = {"drafter": "none", "float32_logits": recycler.options.float32_logits}
    steps = TokenRecycling(recycler.model, recycler.tokenizer, **options)
    for prompt in prompts:
        ids = encode(recycler.tokenizer, prompt)
        answer = recycler.generate(ids, max_new_tokens=max_new_tokens)
        plain, logits, noise = _without_drafts(recycler, ids, max_new_tokens)
        steps_answer = steps.generate(ids, max_new_tokens=max_new_tokens)
        difference = _first_difference(plain, answer.token_ids, logits)
        yield Result(len(plain), difference, noise, steps_answer.token_ids == answer.token_ids)


@torch.no_grad()
def _without_drafts(
    recycler: TokenRecycling, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], Tensor, float]:
    """Return the plain answer of t tokens, its logits float32 [t, V] and their noise."""
    options = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    try:
        out = stock_generate(recycler, prompt, options)
    except ValueError as error:  # caused by the model's generation_config
        line = one_line(error)
        raise TokenRecyclingError(
            f"Transformers cannot generate with this model: {line}"
        ) from error
    with recycler.target.lm_head:
        all_logits = recycler.model(input_ids=out.sequences[:, :-1], use_cache=False).logits[0]
    logits = torch.cat(out.logits).to(all_logits.device)
    noise = (all_logits[len(prompt) - 1 :].float() - logits).abs().max()
    if not torch.isfinite(noise):
        raise TokenRecyclingError(
            "the model's logits are not finite in this dtype; choose another dtype"
        )
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    target = recycler.target
    if isinstance(target, TreeTarget) and target.dtype in (torch.bfloat16, torch.float16):
        # A copy has a context of its own: an answer may go on from the recycler's.
        copied = copy.copy(target)
        ours = torch.cat([copied.prefill([prompt]), *copied.steps(tokens[:-1])]).float()
        noise = torch.maximum(noise, (ours.to(logits.device) - logits).abs().max())
    return tokens, logits, float(noise)


def _first_difference(plain: list[int], recycled: list[int], logits: Tensor) -> _Difference | None:
    for position, (token, other) in enumerate(zip(plain, recycled)):
        if token == other:
            continue
        row = logits[position]
        second = row[other] == row.topk(2).values[1]  # by value: second place may be a tie
        return _Difference(position, token, other, float(row[token] - row[other]), bool(second))
    if len(plain) == len(recycled):
        return None
    return _Difference(min(len(plain), len(recycled)), -1, -1, float("inf"), False)
