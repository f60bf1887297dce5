"""The kernel that writes keys and values to a cache, in Triton's interpreter or on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from skinny_kernels.gpu import cache_kernel
from token_recycling.model import kv_cache
from token_recycling.model.kv_cache import FixedCache, RecyclingCache

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def caches(monkeypatch, key_size, value_size):
    """Two caches after the same step: of the kernel, and of PyTorch."""
    found = []
    for with_kernel in (True, False):
        torch.manual_seed(0)
        like = RecyclingCache(1, 2)
        like.reserve(4)
        first = torch.randn(2, 3, 4, key_size), torch.randn(2, 3, 4, value_size)
        like.layers[0].update(*(one.to(DEVICE) for one in first))
        cache = FixedCache(like, 2, 32, DEVICE)
        cache.fill(4)
        cache.writes_to.slots = torch.tensor([20, 21, 25], device=DEVICE)
        # As layers have them: views of [B, n, heads, size], and parts of one product.
        both = torch.randn(2, 3, 3, key_size + value_size).to(DEVICE).transpose(1, 2)
        states = both.split([key_size, value_size], dim=-1)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "has_device_kernels", lambda device, it=with_kernel: it)
            returned = cache.layers[0].update(*states)
        assert returned[0] is cache.layers[0].keys
        found.append(cache.entries)
    return found


@pytest.mark.parametrize(("key_size", "value_size"), [(16, 16), (24, 16), (8, 80)])
def test_entries_are_written_to_their_slots(monkeypatch, key_size, value_size):
    found, expected = caches(monkeypatch, key_size, value_size)
    assert all(map(torch.equal, found, expected))


def test_a_wrong_slot_turns_this_red(monkeypatch):
    write = cache_kernel.write
    monkeypatch.setattr(cache_kernel, "write", lambda *args: write(*args[:-1], args[-1] - 1))
    found, expected = caches(monkeypatch, 16, 16)
    assert not any(map(torch.equal, found, expected))
