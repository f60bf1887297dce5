"""Random sequences of what a user does with one model: every text is that of ``generate``.

Answers, streams, kept contexts, abandoned streams, exceptions out of callbacks, weights that are
trained and adapters that are switched in between, copies, other precisions.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import warnings

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from architectures import make
from letters import letters
from token_recycling import TokenRecycling, enable

# `make test` runs a few; RANDOM_SEQUENCES=1000 as many.
COUNT = int(os.environ.get("RANDOM_SEQUENCES", "40"))
CHUNKS = 10
OPERATIONS = 7  # of a sequence
TOKENIZER = letters()


class Adapter(torch.nn.Module):
    """A linear layer with a low-rank addition that can be switched off, merged and unmerged."""

    def __init__(self, base):
        super().__init__()
        self.base, self.on, self.merged = base, True, False
        self.a = torch.nn.Parameter(torch.randn(base.in_features, 2) * 0.2)
        self.b = torch.nn.Parameter(torch.randn(2, base.out_features) * 0.2)

    def forward(self, inputs):
        found = self.base(inputs)
        return found + inputs @ self.a @ self.b if self.on and not self.merged else found

    def toggle_merge(self):
        delta = (self.a @ self.b).T.data
        self.base.weight.data += -delta if self.merged else delta
        self.merged = not self.merged


class Broken(Exception):
    pass


class Play:
    """One sequence."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.model = make(self.rng.choice(["llama", "qwen3", "gemma3", "mistral"]))
        for layer in self.model.model.layers[:2]:
            layer.self_attn.k_proj = Adapter(layer.self_attn.k_proj)
            layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
        self.model.generation_config.pad_token_id = 0
        self.recycler = TokenRecycling(
            self.model,
            TOKENIZER,
            drafter=self.rng.choice(["adaptive", "adaptive", "paper", "prompt-lookup"]),
            nodes=self.rng.choice([None, 8, 16, 80]),
        )
        self.read = self.ids(self.rng.randint(1, 30))  # what the last answer has read and written
        self.open = []  # streams that nobody goes on with
        self.done = {}

    def ids(self, count):
        return [self.rng.randint(3, 95) for _ in range(count)]

    @property
    def adapters(self):
        return [one for one in self.model.modules() if isinstance(one, Adapter)]

    def options(self):
        options = {}
        if self.rng.random() < 0.3:
            options |= {
                "temperature": self.rng.choice([0.6, 1.0, 1.6]),
                "seed": self.rng.randint(0, 99),
            }
            if self.rng.random() < 0.5:
                options["top_p"] = 0.8
        if self.rng.random() < 0.2:
            options["repetition_penalty"] = 1.3
        if self.rng.random() < 0.3:
            options["eos_token_id"] = self.rng.sample(range(3, 95), 3)
        return options

    def call(self):
        return self.ids(self.rng.randint(1, 30)), self.rng.randint(2, 30), self.options()

    def right(self, prompt, count, **options):
        options = dict(options)
        seed, temperature = options.pop("seed", 0), options.pop("temperature", 0.0)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        if not temperature:
            options.pop("top_p", None)
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        found = type(self.model).generate(
            self.model,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            **{"do_sample": False, **options, **sampling},
        )
        return found[0, len(prompt) :].tolist()

    def check(self, found, prompt, count, **options):
        assert found == self.right(prompt, count, **options)

    # What can be done

    def answer(self):
        prompt, count, options = (
            self.ids(self.rng.randint(1, 30)),
            self.rng.randint(1, 30),
            self.options(),
        )
        found = self.recycler.generate(prompt, max_new_tokens=count, **options)
        self.check(found.token_ids, prompt, count, **options)
        self.read = prompt + found.token_ids

    def go_on(self):
        keep = len(self.read) if self.rng.random() < 0.7 else self.rng.randint(1, len(self.read))
        prompt = self.read[:keep] + self.ids(self.rng.randint(1, 8))
        count, options = self.rng.randint(1, 30), self.options()
        if len(prompt) + count > 250:
            return self.answer()
        found = self.recycler.generate(prompt, max_new_tokens=count, keep_context=True, **options)
        self.check(found.token_ids, prompt, count, **options)
        self.read = prompt + found.token_ids
        self.done["kept"] = self.done.get("kept", 0) + (found.stats.prompt_tokens < len(prompt))
        return None

    def stream(self):
        prompt, count, options = (
            self.ids(self.rng.randint(1, 30)),
            self.rng.randint(2, 30),
            self.options(),
        )
        stop = self.rng.choice([None, None, "a", "e.", "xn"])
        found = [
            chunk.token_id
            for chunk in self.recycler.stream(prompt, max_new_tokens=count, stop=stop, **options)
        ]
        right = self.right(prompt, count, **options)
        assert found == right[: len(found)]
        assert len(found) == len(right) or stop is not None
        self.read = prompt + found

    def abandon(self):
        prompt = self.ids(self.rng.randint(1, 30))
        stream = self.recycler.stream(prompt, max_new_tokens=30)
        found = [chunk.token_id for chunk, _ in zip(stream, range(self.rng.randint(1, 12)))]
        assert found == self.right(prompt, 30)[: len(found)]
        if self.rng.random() < 0.5:
            self.open.append(stream)  # and it lives on
        self.read = prompt + found

    def batch(self):
        prompts = [self.ids(self.rng.randint(1, 20)) for _ in range(self.rng.randint(2, 4))]
        count, options = self.rng.randint(1, 20), self.options()
        found = self.recycler.generate(prompts, max_new_tokens=count, **options)
        for row, (answer, prompt) in enumerate(zip(found, prompts)):
            own = {**options, "seed": options["seed"] + row} if "seed" in options else options
            self.check(answer.token_ids, prompt, count, **own)

    def enabled(self):
        prompts = [self.ids(self.rng.randint(1, 20)) for _ in range(self.rng.randint(1, 3))]
        longest = max(map(len, prompts))
        call = {
            "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
            "attention_mask": torch.tensor(
                [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
            ),
            "max_new_tokens": self.rng.randint(1, 20),
            "do_sample": self.rng.random() < 0.5,
        }
        ends = set(self.rng.sample(range(3, 95), 5))

        class Ends(StoppingCriteria):
            def __call__(self, ids, scores, **_):
                return all(ends.intersection(row) for row in ids[:, longest:].tolist())

        if self.rng.random() < 0.5:
            call["stopping_criteria"] = StoppingCriteriaList([Ends()])
        seed, outcomes = self.rng.randint(0, 99), []
        with enable(self.model, strict=True) as enabled:
            for generate in (
                type(self.model).generate.__get__(self.model),
                enabled.recycler.model.generate,
            ):
                torch.manual_seed(seed)
                outcomes.append((generate(**call), torch.rand(2)))
        assert all(map(torch.equal, *outcomes))

    def raise_in_a_callback(self):
        prompt, at = self.ids(self.rng.randint(1, 20)), self.rng.randint(0, 6)
        count = [0]

        def fail(*_):
            count[0] += 1
            if count[0] > at:
                raise Broken

        class Failing(LogitsProcessor):
            def __call__(self, ids, scores):
                fail()
                return scores

        where = self.rng.choice(["on_step", "on_progress", "processor", "criterion"])
        try:
            if where == "processor":
                processors = LogitsProcessorList([Failing()])
                self.recycler.generate(prompt, max_new_tokens=20, logits_processor=processors)
            elif where == "criterion":
                ids = torch.tensor([prompt])
                criteria = StoppingCriteriaList([lambda ids, scores, **_: fail() or False])
                with enable(self.model, strict=True):
                    self.model.generate(ids, max_new_tokens=20, stopping_criteria=criteria)
            else:
                self.recycler.generate(prompt, max_new_tokens=20, **{where: fail})
        except Broken:
            pass

    def change_weights(self):
        weights = [(n, w) for n, w in self.model.named_parameters() if w.ndim == 2]
        _, weight = self.rng.choice(weights)
        how = self.rng.choice(["in place", "data", "row", "new"])
        with torch.no_grad():
            if how == "in place":
                weight.mul_(self.rng.uniform(0.7, 1.3))
            elif how == "data":
                weight.data += torch.randn_like(weight) * 0.05
            elif how == "row":
                weight.data[self.rng.randrange(len(weight))] *= -1
            else:
                weight.data = weight.data * 1.1

    def switch_adapters(self):
        for adapter in self.rng.sample(self.adapters, self.rng.randint(1, len(self.adapters))):
            adapter.on = not adapter.on

    def merge_adapters(self):
        for adapter in self.adapters:
            adapter.toggle_merge()

    def other_precision(self):
        self.model.to(torch.float32 if self.model.dtype == torch.float64 else torch.float64)

    def other_mode(self):
        self.model.train(not self.model.training)

    def overflow(self):
        """For one call; what it writes matters little, what it leaves behind does."""
        weight = self.model.lm_head.weight
        row, before = self.rng.randrange(3, 95), weight.detach().clone()
        weight.data[row] = self.rng.choice([float("nan"), float("inf")])
        prompt = self.ids(5)
        self.check(self.recycler.generate(prompt, max_new_tokens=5).token_ids, prompt, 5)
        weight.data.copy_(before)

    def forget(self):
        self.rng.choice([self.recycler.reset, self.recycler.forget_context])()

    def copy(self):
        if self.rng.random() < 0.5:
            self.recycler = copy.deepcopy(self.recycler)
        else:
            self.recycler = pickle.loads(pickle.dumps(self.recycler))
        self.model = self.recycler.model

    def other_default_dtype(self):
        torch.set_default_dtype(self.rng.choice([torch.float64, torch.bfloat16]))
        try:
            self.answer()
        finally:
            torch.set_default_dtype(torch.float32)


ANSWERS = [Play.answer, Play.go_on, Play.go_on, Play.go_on, Play.stream, Play.abandon, Play.batch]
ANSWERS += [Play.enabled, Play.other_default_dtype]
CHANGES = [Play.raise_in_a_callback, Play.change_weights, Play.switch_adapters, Play.merge_adapters]
CHANGES += [
    Play.other_precision,
    Play.other_mode,
    Play.overflow,
    Play.forget,
    Play.copy,
    Play.abandon,
]
total = {"kept": 0, "operations": 0}


def play(seed):
    game = Play(seed)
    told = []
    try:
        for _ in range(OPERATIONS):
            operation = game.rng.choice(ANSWERS if game.rng.random() < 0.6 else CHANGES)
            told.append(operation.__name__)
            operation(game)
        told.append("go_on")
        game.go_on()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {', '.join(told)}: {error!r}") from error
    total["kept"] += game.done.get("kept", 0)
    total["operations"] += len(told)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_text_is_that_of_generate(chunk):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is decoded plainly
        warnings.filterwarnings("ignore", message=".*(pad_token_id|attention mask|max_length).*")
        for seed in range(chunk, COUNT, CHUNKS):
            play(seed)


def test_contexts_were_kept_in_between():
    """Runs after the ones above: with nothing kept, nothing stale would be found."""
    if not total["operations"]:
        pytest.skip("needs the tests above")
    print(total)
    assert total["kept"] >= COUNT // 4


def test_believing_every_cache_turns_this_red(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(
        "token_recycling.model.prefix_cache.PrefixCache._is_valid", lambda self, count: True
    )

    def many():
        for seed in range(200):
            play(seed)

    with pytest.raises(AssertionError, match="go_on"):
        many()
