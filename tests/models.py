"""Architectures and trees that the tests share, random prompts and plain decoding."""

from __future__ import annotations

import torch

from architectures import VOCABULARY

# One architecture of each kind, used by most tests; `make test-models` covers all others.
SUPPORTED = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "llama4",
    "phi3",
)
# Architectures that the probe must refuse, so that they are decoded plainly.
REFUSED = ("bloom", "mpt", "mamba", "gpt_neo", "qwen3_next")
# Drafts of every kind: of several sizes, trees of fixed shape, and of automatic size.
DRAFTS = (
    {"nodes": 4},
    {"nodes": 8},
    {"nodes": 16},
    {"nodes": 32},
    {"drafter": "paper"},
    {"drafter": "paper", "tree": "chain-6"},
    {},
)


def random_prompts(lengths, seed=1, vocabulary=VOCABULARY):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=rng).tolist() for n in lengths]


def plain(model, prompt, n, **options):
    """Return the new tokens of ``model.generate`` for one prompt; greedy by default."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": n} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()
