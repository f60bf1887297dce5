"""Recording a step: keyboard interrupts, and tensors that other packages have made."""

from __future__ import annotations

import sys
from traceback import clear_frames
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from skinny_kernels.capture import Capture, Scratch
from skinny_kernels.replay import StepInputs


def interrupt_where_a_mode_returns(mode):
    """Serve a function as PyTorch does, and interrupt it where the mode is put back."""

    def trace(frame, event, argument):
        if frame.f_code.co_name == "__exit__" and frame.f_code.co_filename.endswith(
            "contextlib.py"
        ):
            raise KeyboardInterrupt

    with mode:
        sys.settrace(trace)
        try:
            with _pop_mode_temporarily():
                pass
        finally:
            sys.settrace(None)


def stacked() -> int:
    """How many modes are on."""
    return torch._C._len_torch_function_stack()


def capture() -> Capture:
    tokens = torch.zeros(1, 1, dtype=torch.long)
    ancestors = torch.ones(1, 1, 1, dtype=torch.bool)
    cache: Any = None
    return Capture(Scratch(), StepInputs(tokens, tokens, ancestors, cache, {}, torch.float32))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as packages for quantisation make them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        own = [one.inner if isinstance(one, cls) else one for one in args]
        return function(*own, **(kwargs or {}))


def test_weights_without_memory_of_their_own():
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with capture() as captured:
        found = functional.linear(x, Wrapped(w))
        Wrapped(w).view(8, 4)
    torch.testing.assert_close(found, functional.linear(x, w))
    assert captured.noted.unknown[0][0] == "linear"
    assert captured.noted.reason is None
    with capture() as captured:
        torch.add(Wrapped(w), 1, out=w)
    assert captured.noted.reason == "it calls add"


@pytest.fixture
def no_modes():
    """No mode is on, not even that of another test's default device."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(stacked())]
    yield
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


@pytest.mark.parametrize("made", [capture, TorchFunctionMode])
def test_an_interrupt_where_pytorch_puts_the_mode_back(made, no_modes):
    mode = made()
    expected = KeyboardInterrupt if made is capture else RuntimeError  # the control
    with pytest.raises(expected) as raised:
        interrupt_where_a_mode_returns(mode)
    if made is capture:
        assert stacked() == 0
    clear_frames(raised.tb)
    del raised
    left = stacked()
    assert left == (0 if made is capture else 1)
    for _ in range(left):
        torch._C._pop_torch_function_stack()
