"""Models placed by accelerate: layers offloaded to disk stand in for several devices."""

import pytest
import torch

from models import plain
from token_recycling import TokenRecycling, enable
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.model.fallback import PlainTarget

PROMPTS = [[5, 60, 700, 8], [900, 33, 2001, 17, 640, 12]]
LAYERS = {f"model.layers.{i}": "cpu" for i in range(6)}
REST = {
    "model.embed_tokens": "cpu",
    "model.norm": "cpu",
    "lm_head": "cpu",
    "model.rotary_emb": "cpu",
}
MAPS = {
    "auto": "auto",
    "half the layers on disk": LAYERS | REST | {f"model.layers.{i}": "disk" for i in (0, 2, 5)},
    "embedding and head on disk": LAYERS | REST | {"model.embed_tokens": "disk", "lm_head": "disk"},
}


@pytest.fixture(scope="module")
def expected(bundled):
    return [plain(bundled.model, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("name", MAPS)
def test_it_is_identical(name, expected, tmp_path):
    recycler = TokenRecycling.from_pretrained(
        BUNDLED_MODEL, device_map=MAPS[name], offload_folder=str(tmp_path), strict=True
    )
    assert not isinstance(recycler.target, PlainTarget)
    offloaded = any(parameter.is_meta for parameter in recycler.model.parameters())
    assert offloaded == (name != "auto")
    found = [recycler.generate(prompt, max_new_tokens=40).token_ids for prompt in PROMPTS]
    assert found == expected
    batch = recycler.generate(PROMPTS, max_new_tokens=40)
    assert [answer.token_ids for answer in batch] == expected
    with enable(recycler.model, strict=True):
        out = recycler.model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=40)
    assert out[0, len(PROMPTS[0]) :].tolist() == expected[0]
