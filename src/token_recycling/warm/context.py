"""Chooses the tokens in front of a token on its own, by what predicts best in running text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from token_recycling.drafting.candidates import top_k
from token_recycling.model.target import TreeTarget
from token_recycling.warm.fill import after, largest_batch

LONGEST_HEADER = 8  # tokens; every token of a context adds to the cost of every row
TEXT_TOKENS = 96  # of each text
SHARE = 0.1  # of the tokens to fill that the measurement may read
STOPPABLE = 8  # tokens per forward of a measurement that can be stopped
FEWEST = 32  # distinct tokens compared, whatever their share
CERTAIN = 2.0  # standard errors by which a context must be better than none
TEXTS = (
    "The weather had been fine all morning, but by noon the wind turned and dark clouds came in "
    "from the sea. Anna closed the windows and looked for her brother, who was still in the "
    'garden. "Come inside," she said, "it will rain soon." He did not want to leave, because he '
    "had found a small bird under the tree, and it could not fly. They took it into the kitchen.",
    "To make bread, mix the flour, the salt and the yeast in a large bowl, add the water and stir "
    "until there is no dry flour left. 1. Cover the bowl and let the dough rest for an hour. "
    "2. Fold it a few times. 3. Shape it and put it in the oven. If you do not have an oven, you "
    "can use a pan with a lid. The answer is that it takes about 40 minutes at 230 degrees.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nif __name__ == '__main__':\n    data = [1, 2, 3, 4]\n"
    "    print(mean(data))\n",
    "The first railways were built in the early 19th century. They made it possible to carry "
    "goods and people over long distances at a lower cost than before. In 1830 the line between "
    "Liverpool and Manchester was opened, and many other countries began to build their own. This "
    "is why the number of people who lived in cities increased in the years that followed.",
)


@dataclass(frozen=True)
class WarmPrefix:
    """Tokens to put in front of a token: "nothing", "bos", "newline" or "assistant"."""

    name: str
    tokens: tuple[int, ...] = ()


NOTHING = WarmPrefix("nothing")


def frequent_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens of ``TEXTS``, the most frequent first; none without a tokenizer.

    The rows of a few hundred frequent tokens serve half of all positions of an English text.
    """
    counts: Counter[int] = Counter()
    for text in TEXTS if tokenizer is not None else ():
        counts.update(tokenizer(text, add_special_tokens=False).input_ids)
    return [token for token, _ in counts.most_common()]


def contexts(tokenizer: Any, vocab_size: int) -> list[WarmPrefix]:
    """Return the contexts that a tokenizer (or None) has, without duplicates, NOTHING first."""
    found = [NOTHING]
    if tokenizer is not None:
        bos = getattr(tokenizer, "bos_token_id", None)
        newline = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        found += [
            WarmPrefix("bos", () if bos is None else (int(bos),)),
            WarmPrefix("newline", tuple(newline)),
            WarmPrefix("assistant", _header(tokenizer)),
        ]
    distinct: dict[tuple[int, ...], WarmPrefix] = {}
    for one in found:
        known = all(0 <= token < vocab_size for token in one.tokens)
        if known and len(one.tokens) <= LONGEST_HEADER:
            distinct.setdefault(one.tokens, one)
    return list(distinct.values())


def choose(
    target: TreeTarget,
    tokenizer: Any,
    k: int,
    expected: int,
    stop: Callable[[], bool] | None = None,
) -> tuple[WarmPrefix, dict[str, float]] | None:
    """Choose the context whose rows predict the model's own next tokens best.

    The model reads ``TEXTS``. At every position the row of the token there, under each context, is
    compared with the model's most likely next token: 1 if that is the first candidate, 1/2 if it
    is the second, and so on, 0 if it is none of them. A context that is not clearly better than
    nothing is not chosen.

    Args:
        target: the model.
        tokenizer: its tokenizer; None: the answer is NOTHING, and nothing is computed.
        k: candidates per row.
        expected: tokens that will be filled; bounds the cost.
        stop: ends the measurement when it returns True.

    Returns:
        The context, and the mean score of each context measured; None if it was stopped.
    """
    candidates = contexts(tokenizer, target.vocab_size)
    if len(candidates) == 1:
        return NOTHING, {}
    with target.inference_context():
        parts = []
        for text in _texts(target, tokenizer):
            if stop is not None and stop():
                return None
            parts.append(_read(target, text))
        if not parts:
            return NOTHING, {}
        tokens, answers = (torch.cat(part) for part in zip(*parts))
        cost = sum(len(context.tokens) + 1 for context in candidates)
        counts = tokens.bincount()
        most = min(max(FEWEST, int(SHARE * expected) // cost), int((counts > 0).sum()))
        distinct = counts.argsort(descending=True, stable=True)[:most]
        places = (tokens[:, None] == distinct).nonzero()  # (position, index in distinct)
        answers = answers[places[:, 0], None]
        scores = {}
        batches = STOPPABLE if stop is not None else target.vocab_size
        for context in candidates:
            largest = min(batches, largest_batch(target, len(context.tokens) + 1))
            found = []
            for part in torch.split(distinct, largest):
                if stop is not None and stop():
                    return None
                logits = after(target, context.tokens, part)[:, : target.vocab_size]
                found.append(top_k(logits, k)[1])
            ids = torch.cat(found)
            right = ids[places[:, 1]] == answers
            ranks = torch.arange(1, k + 1, device=right.device)
            scores[context] = (right / ranks).sum(dim=1).double().cpu()
    winner = max(candidates, key=lambda context: float(scores[context].mean()))
    gain = scores[winner] - scores[NOTHING]
    noise = float(gain.std()) / sqrt(len(gain)) if len(gain) > 1 else float("inf")
    if not float(gain.mean()) > CERTAIN * noise:
        winner = NOTHING
    return winner, {context.name: float(score.mean()) for context, score in scores.items()}


def _texts(target: TreeTarget, tokenizer: Any) -> list[Tensor]:
    """Return the texts that the model reads, each int64 [1, n], n at least 2."""
    longest = min(TEXT_TOKENS, target.max_context or TEXT_TOKENS)
    texts = (
        [token for token in tokenizer(text).input_ids if token < target.vocab_size][:longest]
        for text in TEXTS
    )
    return [torch.tensor([ids], device=target.device) for ids in texts if len(ids) > 1]


def _read(target: TreeTarget, text: Tensor) -> tuple[Tensor, Tensor]:
    """Read a text; return its tokens, int64 [n], and the model's answers, int64 [n].

    The first token is left out, since it has no text before it.
    """
    logits = target.read_independent(text)[0, 1:, : target.vocab_size]
    return text[0, 1:], logits.argmax(dim=-1)


def _header(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens between a question and its answer in the chat template, () if none."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    question = [{"role": "user", "content": "Hello"}]
    try:
        without, whole = (
            tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=answer)
            for answer in (False, True)
        )
    except Exception:  # jinja errors, or anything that the template raises
        return ()
    if not whole.startswith(without):
        return ()
    return tuple(tokenizer(whole[len(without) :], add_special_tokens=False).input_ids)
