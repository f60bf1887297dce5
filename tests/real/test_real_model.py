"""A real model: its own choices, token by token, computed in one forward without a cache.

That is what plain decoding does, and takes a tenth of its time: every token of an answer is the
model's choice after the prompt and the tokens before it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx2 as httpx
import pytest
import torch

from conformance import break_masks
from models import plain
from questions import questions
from serving import running
from token_recycling.decoding.text import encode
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.prefix_cache import PrefixCache

pytestmark = pytest.mark.real

TOKENS = 200
PER_KIND, OTHERS = 2, 7  # 13 kinds of Spec-Bench, GSM8K and MBPP: 40 questions
ALONE = 8
T = 0.8
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def prompts(loaded, shared_data):
    asked = [one.turns[0] for one in questions(shared_data, PER_KIND, OTHERS)]
    assert len(asked) == 40
    return [encode(loaded.tokenizer, [{"role": "user", "content": text}]) for text in asked]


@torch.inference_mode()
def logits_of(recycler, prompt, answer):
    """The model's own logits before every token of the answer, float32 [n, V]."""
    ids = torch.tensor([[*prompt, *answer]])
    hidden = recycler.model.model(ids, use_cache=False).last_hidden_state
    return recycler.model.lm_head(hidden[0, len(prompt) - 1 : -1]).float()


def is_greedy(recycler, prompt, answer, tokens=TOKENS):
    """True if ``answer`` is what greedy decoding writes, and ends where it ends."""
    assert answer[-1] == END or len(answer) == tokens
    return logits_of(recycler, prompt, answer).argmax(dim=-1).tolist() == answer


def is_sampled(recycler, prompt, answer, seed, tokens=TOKENS):
    """True if ``answer`` is what ``generate`` draws with this seed at temperature ``T``."""
    assert answer[-1] == END or len(answer) == tokens
    draws = torch.Generator().manual_seed(seed)
    logits = logits_of(recycler, prompt, answer) / T
    kept = logits.topk(50, dim=-1).values[:, -1:]  # generate's default of top_k
    shares = logits.masked_fill(logits < kept, -torch.inf).softmax(dim=-1)
    drawn = [int(torch.multinomial(share, 1, generator=draws)) for share in shares]
    return drawn == answer


def test_greedy_text_of_40_questions(real, prompts):
    """Some one by one, the others in batches of four with prompts of different lengths."""
    answers = [real.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts[:ALONE]]
    for begin in range(ALONE, len(prompts), 4):
        answers += real.generate(prompts[begin : begin + 4], max_new_tokens=TOKENS)
    wrong = [
        i
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if not is_greedy(real, prompt, answer.token_ids)
    ]
    assert not wrong
    assert sum(len(answer.token_ids) for answer in answers) > 4000
    assert sum(answer.stats.accepted for answer in answers) > 1500


def test_sampled_text_of_40_questions(real, prompts):
    """In batches of four; row b draws like a single prompt with the seed + b."""
    answers = []
    for begin in range(0, len(prompts), 4):
        batch = prompts[begin : begin + 4]
        answers += real.generate(batch, max_new_tokens=TOKENS, temperature=T, seed=begin)
    wrong = [
        i
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if not is_sampled(real, prompt, answer.token_ids, seed=i)
    ]
    assert not wrong
    assert not is_sampled(real, prompts[0], answers[0].token_ids, seed=1)
    assert sum(answer.stats.accepted for answer in answers) > 400


def test_the_checks_agree_with_generate(real, prompts):
    """The text of ``model.generate`` passes both checks, and is ours."""
    for prompt in (prompts[4], prompts[14]):
        greedy = plain(real.model, prompt, 60)
        assert is_greedy(real, prompt, greedy, 60)
        assert real.generate(prompt, max_new_tokens=60).token_ids == greedy
        torch.manual_seed(5)
        sampled = plain(real.model, prompt, 60, do_sample=True, temperature=T)
        assert is_sampled(real, prompt, sampled, 5, 60)
        ours = real.generate(prompt, max_new_tokens=60, temperature=T, seed=5)
        assert ours.token_ids == sampled


def wrong_positions(target):
    """Nodes get the position after the root's, however deep they are."""
    right = target.verify
    target.verify = lambda draft: right(replace(draft, depths=draft.depths.clamp(max=1)))


def wrong_commit(target, monkeypatch):
    """Keys and values stay where they were verified."""

    def commit(self, path, counts):
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    monkeypatch.setattr(RecyclingCache, "commit", commit)


@pytest.mark.parametrize("fault", ["mask", "positions", "commit"])
def test_faults_show(real, prompts, fault, monkeypatch):
    """The negative controls of the first test."""
    verify = real.target.verify
    try:
        if fault == "mask":
            break_masks(real)
        elif fault == "positions":
            wrong_positions(real.target)
        else:
            wrong_commit(real.target, monkeypatch)
        answers = real.generate(prompts[:4], max_new_tokens=60)
    finally:
        real.target.verify = verify
    assert not all(
        is_greedy(real, prompt, answer.token_ids, 60)
        for prompt, answer in zip(prompts, answers)
        if len(answer.token_ids) == 60
    )


QUESTIONS = (
    "Name three famous rivers in Europe.",
    "Which of them is the longest?",
    "Write one sentence about a journey along it.",
)


def conversation(recycler, **options):
    """Three turns; return the prompt, the answer and the prompt tokens read of each."""
    messages, found = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = recycler.generate(messages, max_new_tokens=60, keep_context=True, **options)
        found.append(
            (encode(recycler.tokenizer, messages), answer.token_ids, answer.stats.prompt_tokens)
        )
        messages.append({"role": "assistant", "content": answer.text})
    return found


def test_a_chat_of_three_turns_keeps_its_context(real):
    turns = conversation(real)
    for prompt, answer, _ in turns:
        assert is_greedy(real, prompt, answer, 60)
    assert turns[0][2] == len(turns[0][0])
    assert all(read < len(prompt) / 2 for prompt, _, read in turns[1:])


def test_a_context_of_another_text_shows(real, monkeypatch):
    """The control: the keys and values of one text are taken for those of another."""
    first, other = ([{"role": "user", "content": text}] for text in (QUESTIONS[0], QUESTIONS[2]))
    real.generate(first, max_new_tokens=60, keep_context=True)
    prompt = encode(real.tokenizer, other)
    monkeypatch.setattr(PrefixCache, "common", lambda self, tokens: len(tokens))
    answer = real.generate(prompt, max_new_tokens=60, keep_context=True)
    assert answer.stats.prompt_tokens < len(prompt)
    assert not is_greedy(real, prompt, answer.token_ids, 60)


def length(i, tokens):
    return tokens if i % 4 else tokens // 3


async def streamed(client, body):
    parts = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(parts)


def served(recycler, prompts, tokens=40):
    """Ask a server for all prompts at once; return the texts.

    Every second one is sampled, every third one streamed, and some are short.
    """

    async def run(url):
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:

            async def one(i, prompt):
                options = {"temperature": T, "seed": i} if i % 2 else {"temperature": 0.0}
                body = {"prompt": prompt, "max_tokens": length(i, tokens), **options}
                if i % 3 == 0:
                    return await streamed(client, body)
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["text"]

            return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    with running(recycler, rows=8) as server:
        return asyncio.run(run(server.url))


def alone(recycler, prompts, tokens=40):
    """The texts of ``generate`` for the same."""
    return [
        recycler.generate(
            prompt,
            max_new_tokens=length(i, tokens),
            **({"temperature": T, "seed": i} if i % 2 else {}),
        ).text
        for i, prompt in enumerate(prompts)
    ]


def test_24_mixed_requests_at_once_three_times(real, prompts):
    """Eight are decoded at once; the matrix is empty at first, and then keeps what it learns."""
    asked = [prompt for prompt in prompts if len(prompt) < 400][:24]
    wanted = alone(real, asked)
    assert len(set(wanted)) == len(asked) == 24
    real.reset()
    for _ in range(3):
        assert served(real, asked) == wanted


def test_rows_of_the_server_that_are_mixed_up_show(real, prompts, monkeypatch):
    """The control: when a row joins, the others get the keys of their neighbours."""
    asked = [prompt for prompt in prompts if len(prompt) < 400][:8]
    wanted = alone(real, asked, 24)
    real.reset()
    right = RecyclingCache.append

    def wrong(self, other):
        right(self, other)
        for layer in self.layers:
            layer.keys.copy_(layer.keys.roll(1, dims=0).clone())

    monkeypatch.setattr(RecyclingCache, "append", wrong)
    assert served(real, asked, 24) != wanted
