"""Text from the server is that of ``TokenRecycling.generate``, whatever else it is decoding."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from itertools import pairwise

import httpx2 as httpx
import pytest

from conformance import scale_products
from serving import running
from token_recycling import TokenRecycling
from token_recycling.bench.suites import load
from token_recycling.decoding.text import encode
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import TreeTarget
from token_recycling.server import engine

REQUESTS, AT_ONCE = 64, 8
ABORTED = 8  # every so many-th request is ended after its first tokens


def requests(count=REQUESTS):
    """Bodies of mixed kinds and lengths: chats, greedy and sampled, with penalties and stops."""
    random_numbers = random.Random(7)
    prompts = [one.turns[0] for one in load("builtin")]
    bodies = []
    for index in range(count):
        body = {
            "messages": [{"role": "user", "content": prompts[index % len(prompts)]}],
            "max_tokens": random_numbers.choice([1, 7, 24, 60, 110]),
            "temperature": 0.0,
        }
        if index % 4 == 1:
            body |= {"temperature": 0.8, "seed": index, "top_p": 0.95}
        if index % 8 == 6:
            body |= {"stop": [".", "?"]}
        bodies.append(body)
    return bodies


def expected(recycler, body):
    """What ``generate`` answers."""
    options = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
    for name in ("seed", "top_p", "stop"):
        if name in body:
            options[name] = body[name]
    return recycler.generate(body["messages"], **options).text


async def _ask(client, body, index):
    """The text of an answer, streamed for every other request; None if it was ended early."""
    if index % 2 == 0:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as got:
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content", "")
            if index % ABORTED == 3 and text:
                return None
    return text


def answers(url, bodies, at_once=AT_ONCE):
    """The answers to all bodies, so many at once."""

    async def run():
        room = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:

            async def one(index, body):
                async with room:
                    return await _ask(client, body, index)

            return await asyncio.gather(*(one(*item) for item in enumerate(bodies)))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def texts():
    """Bodies, and what a recycler of its own answers to them."""
    recycler = TokenRecycling.from_pretrained(device="cpu")
    bodies = requests()
    return bodies, [expected(recycler, body) for body in bodies]


@pytest.mark.parametrize("rows", [8, pytest.param(3, marks=pytest.mark.slow)])
def test_text_is_that_of_generate(texts, rows):
    bodies, wanted = texts
    recycler = TokenRecycling.from_pretrained(device="cpu")
    with running(recycler, rows=rows) as served:
        found = answers(served.url, bodies)
        served.idle()
        assert served.rows == 0
        end = time.monotonic() + 20
        while served.engine._batch._cache is not None:  # the room of rows that have left
            assert time.monotonic() < end
            time.sleep(0.1)
        assert served.metric("request_success_total", finished_reason="error") == 0
        if rows > 1:
            assert served.metric("spec_decode_num_accepted_tokens_total") > 100
    ended = [index for index, text in enumerate(found) if text is None]
    assert len(ended) == REQUESTS // ABORTED
    assert len(set(wanted)) > REQUESTS // 2
    differ = [i for i, text in enumerate(found) if text is not None and text != wanted[i]]
    assert not differ


@pytest.mark.parametrize("fault", [False, True])
def test_text_in_half_precision_is_that_without_drafts_alone(fault, monkeypatch):
    """Every prompt is read from its beginning; the control multiplies several tokens otherwise."""
    model = {"device": "cpu", "dtype": "bfloat16"}
    bodies = requests(32)
    plain = TokenRecycling.from_pretrained(**model, drafter="none")
    wanted = [expected(plain, body) for body in bodies]
    recycler = TokenRecycling.from_pretrained(**model)
    assert recycler.batch_invariant
    if fault:
        scale_products(monkeypatch, 1.02)
    with running(recycler, prefix=0) as served:
        found = answers(served.url, bodies)
        served.idle()
    differ = [i for i, text in enumerate(found) if text is not None and text != wanted[i]]
    assert bool(differ) == fault


@pytest.mark.parametrize("prefix", [2**26, 0])
def test_a_full_batch_pauses_rows_and_keeps_the_text(texts, prefix, monkeypatch):
    """Rows leave a batch that has grown too large, and join again; with and without their cache."""
    bodies, wanted = texts
    monkeypatch.setattr(engine, "BATCH_TOKENS", 500)
    monkeypatch.setattr(engine, "ROOM", 8)
    right, paused, largest = engine.Engine._pause, [], []

    def pause(self):
        right(self)
        paused.append(len(self._paused))
        lengths = [len(row.sequence.tokens) for row in self._batch.rows]
        if len(lengths) > 1:
            largest.append(max(lengths) * len(lengths))

    monkeypatch.setattr(engine.Engine, "_pause", pause)
    recycler = TokenRecycling.from_pretrained(device="cpu")
    with running(recycler, prefix=prefix) as served:
        found = answers(served.url, bodies)
        served.idle()
        tokens = served.metric("generation_tokens_total")
        read = served.metric("prompt_tokens_total")
    assert sum(map(bool, paused)) > 10  # how many at once depends on when requests arrive
    assert 300 < max(largest) <= 500
    differ = [i for i, text in enumerate(found) if text is not None and text != wanted[i]]
    assert not differ
    assert tokens > 1000
    # A prompt that is read again is counted once.
    assert read == sum(len(encode(recycler.tokenizer, body["messages"])) for body in bodies)


def test_paused_rows_whose_clients_have_gone_block_nobody(monkeypatch):
    monkeypatch.setattr(engine, "BATCH_TOKENS", 300)
    monkeypatch.setattr(engine, "ROOM", 8)
    recycler = TokenRecycling.from_pretrained(device="cpu")
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 1.0, "seed": 1}
    body |= {"stream": True, "logit_bias": {"1": -100}}
    with running(recycler) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        streams = [client.stream("POST", "/v1/completions", json=body) for _ in range(3)]
        answers = [stream.__enter__() for stream in streams]
        first = [answer.iter_lines() for answer in answers]
        for lines in first:
            next(lines)
        end = time.monotonic() + 20
        while len(served.engine._paused) < 2:
            assert time.monotonic() < end
            next(first[0])
        gone = {id(row.job) for row in served.engine._paused}
        assert gone
        for stream in streams[1:]:
            stream.__exit__(None, None, None)
        end = time.monotonic() + 3
        while served.engine._paused:
            assert time.monotonic() < end
            time.sleep(0.01)
        streams[0].__exit__(None, None, None)
        served.idle()


def test_one_request_at_a_time_reuses_contexts_and_keeps_the_text(texts):
    bodies, wanted = texts
    recycler = TokenRecycling.from_pretrained(device="cpu")
    with running(recycler) as served:
        for _ in range(2):
            assert answers(served.url, bodies[:6:2], at_once=1) == wanted[:6:2]
        assert served.metric("prefix_cache_hits_total") > 50


@pytest.mark.parametrize("broken", ["append", "remove", "copy"])
def test_a_cache_that_mixes_rows_changes_texts(texts, broken, monkeypatch):
    """The checks above fail if keys and values become those of another row or position."""
    bodies, wanted = texts
    right = getattr(RecyclingCache, broken)

    def wrong(self, *args):
        made = right(self, *args)
        cache = made or self
        for layer in cache.layers:
            layer.keys.copy_(layer.keys.roll(1, dims=2 if broken == "copy" else 0).clone())
        return made

    monkeypatch.setattr(RecyclingCache, broken, wrong)
    recycler = TokenRecycling.from_pretrained(device="cpu")
    with running(recycler) as served:
        found = answers(served.url, bodies[:24])
    differ = [i for i, text in enumerate(found) if text is not None and text != wanted[i]]
    assert differ


def test_the_same_seed_gives_the_same_text(server):
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 1.0}

    def texts(**more):
        answer = server.post("/v1/completions", **body, **more).json()
        return [choice["text"] for choice in answer["choices"]]

    assert texts(seed=5) == texts(seed=5)
    assert texts(seed=5) != texts(seed=6)
    assert texts() != texts()
    several = texts(seed=5, n=3)
    assert several == texts(seed=5) + texts(seed=6) + texts(seed=7)
    assert texts(seed=-1) == texts(seed=2**63 - 1)


def test_long_prompts_do_not_stop_other_answers(recycler):
    """Other rows advance after every chunk of a prompt, and all texts stay what they are."""
    story = "The cat sat on the mat, and the dog ran to the door. " * 110
    short = {"prompt": "Once upon a time", "max_tokens": 600, "temperature": 0}
    alone = TokenRecycling.from_pretrained(device="cpu")
    wanted = [
        alone.generate(prompt, max_new_tokens=tokens).text
        for prompt, tokens in (("Once upon a time", 600), (story, 5))
    ]
    chunks = []
    forward, verify = TreeTarget._forward, TreeTarget.verify

    def watched(self, tokens, *args, **options):
        chunks.append((tokens.shape[0], tokens.shape[1]))
        return forward(self, tokens, *args, **options)

    def watched_step(self, draft):
        chunks.append(tuple(draft.tokens.shape))
        return verify(self, draft)

    with running(recycler, prefix=0) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeTarget, "_forward", watched)
        patch.setattr(TreeTarget, "verify", watched_step)
        first = {}
        thread = threading.Thread(
            target=lambda: first.update(served.post("/v1/completions", **short).json())
        )
        thread.start()
        while served.rows != 1:
            time.sleep(0.001)
        second = served.post("/v1/completions", prompt=story, max_tokens=5, temperature=0).json()
        thread.join()
    assert [one["choices"][0]["text"] for one in (first, second)] == wanted
    large = [at for at, (_, tokens) in enumerate(chunks) if tokens > 256]
    assert len(large) >= 2
    # Between two chunks of the long prompt there is a step of the other row.
    assert all(later - earlier > 1 for earlier, later in pairwise(large))
